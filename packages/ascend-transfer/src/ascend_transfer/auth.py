# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Authentication of ZMQ connections: CURVE keys derived from a secret that instances share.

Peers without the secret can neither send queries nor reply, and messages are encrypted
(https://rfc.zeromq.org/spec/26).
"""

from __future__ import annotations

import hmac
import ipaddress
import socket

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable from this machine only."""
    try:
        return all(
            ipaddress.ip_address(each[4][0]).is_loopback for each in socket.getaddrinfo(host, None)
        )
    except (OSError, ValueError):
        return False


class CurveKeys:
    """Key pairs derived from the secret: one for clients, one for servers."""

    def __init__(self, secret: bytes) -> None:
        self._client_keys = _derive_keypair(secret, b"asks")
        self._server_keys = _derive_keypair(secret, b"answers")

    def configure_client(self, socket: zmq.Socket) -> None:
        """Set the keys of a client socket, before it connects."""
        socket.curve_publickey, socket.curve_secretkey = self._client_keys
        socket.curve_serverkey = self._server_keys[0]

    def configure_server(self, socket: zmq.Socket) -> ThreadAuthenticator:
        """Set the keys of a server socket, before it binds; stop the returned authenticator before
        closing the context."""
        authenticator = ThreadAuthenticator(socket.context)
        authenticator.start()
        authenticator.configure_curve_callback("*", self)
        socket.curve_publickey, socket.curve_secretkey = self._server_keys
        socket.curve_server = True
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's public key, in Z85, is accepted; pyzmq calls it for each
        connection."""
        return hmac.compare_digest(key, self._client_keys[0])


def _derive_keypair(secret: bytes, use: bytes) -> tuple[bytes, bytes]:
    # The name that the library had before, as in ``secret.py``.
    private = z85.encode(hmac.digest(secret, b"ascend_platform.transfer " + use, "sha256"))
    return zmq.curve_public(private), private
