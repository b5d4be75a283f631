"""Authentication of ZMQ connections: CURVE keys derived from a secret that instances share.

Peers without the secret can neither send queries nor reply, and messages are encrypted (https://rfc.zeromq.org/spec/26).
"""

from __future__ import annotations

import hmac
import ipaddress
import socket

import zmq
from ascend_platform import extension
from ascend_platform.transfer.secret import MIN_SECRET_BYTES, find_secret
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

SECRET_ENV = "VLLM_ASCEND_KV_SECRET"


def read_secret(secret_file: str) -> bytes:
    """The secret from the file, otherwise from the environment variable; empty if neither is set.

    Raises:
        RefusedError: the file cannot be read, or the secret is shorter than 16 bytes, in one line.
    """
    source = f"kv_connector_extra_config.secret_file {secret_file}" if secret_file else SECRET_ENV
    try:
        found = find_secret(secret_file, SECRET_ENV)
    except OSError as error:
        raise extension.RefusedError(f"{source} cannot be read: {error.strerror}") from None
    if len(found) < MIN_SECRET_BYTES and (found or secret_file):
        raise extension.RefusedError(f"{source} has a secret of {len(found)} bytes; it needs at least {MIN_SECRET_BYTES}")
    return found


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable from this machine only."""
    try:
        return all(ipaddress.ip_address(each[4][0]).is_loopback for each in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False


def require_secret(secret: bytes, insecure: bool, host: str) -> None:
    """Check that an instance that other machines can reach has a secret.

    Raises:
        RefusedError: it has none, and is not to be insecure.
    """
    if not secret and not insecure and not is_loopback(host):
        raise extension.RefusedError(
            f"AscendP2PConnector: other machines can reach {host}, and anyone there could fetch KV cache; set secret_file in "
            f'kv_connector_extra_config or {SECRET_ENV} on all instances, or "insecure": true'
        )


class CurveKeys:
    """Key pairs derived from the secret: one for clients, one for servers."""

    def __init__(self, secret: bytes) -> None:
        self._client_keys, self._server_keys = _derive_keypair(secret, b"asks"), _derive_keypair(secret, b"answers")

    def configure_client(self, socket: zmq.Socket) -> None:
        """Set the keys of a client socket, before it connects."""
        socket.curve_publickey, socket.curve_secretkey = self._client_keys
        socket.curve_serverkey = self._server_keys[0]

    def configure_server(self, socket: zmq.Socket) -> ThreadAuthenticator:
        """Set the keys of a server socket, before it binds; stop the returned authenticator before closing the context."""
        authenticator = ThreadAuthenticator(socket.context)
        authenticator.start()
        authenticator.configure_curve_callback("*", self)
        socket.curve_publickey, socket.curve_secretkey = self._server_keys
        socket.curve_server = True
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's public key, in Z85, is accepted; pyzmq calls it for each connection."""
        return hmac.compare_digest(key, self._client_keys[0])


def _derive_keypair(secret: bytes, use: bytes) -> tuple[bytes, bytes]:
    private = z85.encode(hmac.digest(secret, b"ascend-kv-connector " + use, "sha256"))
    return zmq.curve_public(private), private
