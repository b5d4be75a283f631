"""A secret that instances share, as keys of zmq's CURVE.

Who does not have it can neither ask nor answer, and what is said is encrypted (https://rfc.zeromq.org/spec/26).
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from pathlib import Path

import zmq
from ascend_platform import extension
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

VARIABLE = "VLLM_ASCEND_KV_SECRET"
LEAST = 16
"""Bytes of a secret."""


def secret(secret_file: str) -> bytes:
    """The content of the file, else of the environment variable; empty if there is neither.

    Raises:
        RefusedError: the file cannot be read, or the secret is shorter than 16 bytes, in one line.
    """
    where, found = VARIABLE, os.environ.get(VARIABLE, "").encode()
    if secret_file:
        where = f"kv_connector_extra_config.secret_file {secret_file}"
        try:
            found = Path(secret_file).read_bytes()
        except OSError as error:
            raise extension.RefusedError(f"{where} cannot be read: {error.strerror}") from None
    found = found.strip()
    if len(found) < LEAST and (found or secret_file):
        raise extension.RefusedError(f"{where} has a secret of {len(found)} bytes; it needs at least {LEAST}")
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host by its name or address."""
    try:
        return all(ipaddress.ip_address(each[4][0]).is_loopback for each in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False


class Keys:
    """All who have the secret make the same two pairs of keys of it: one for who asks, one for who answers."""

    def __init__(self, secret: bytes) -> None:
        self._asks, self._answers = _pair(secret, b"asks"), _pair(secret, b"answers")

    def ask(self, socket: zmq.Socket) -> None:
        """Before it connects."""
        socket.curve_publickey, socket.curve_secretkey = self._asks
        socket.curve_serverkey = self._answers[0]

    def answer(self, socket: zmq.Socket) -> ThreadAuthenticator:
        """Before it is bound; the result is to be stopped before its context ends."""
        guard = ThreadAuthenticator(socket.context)
        guard.start()
        guard.configure_curve_callback("*", self)
        socket.curve_publickey, socket.curve_secretkey = self._answers
        socket.curve_server = True
        return guard

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by pyzmq for each connection: whether this public key, in Z85, may ask."""
        return hmac.compare_digest(key, self._asks[0])


def _pair(secret: bytes, use: bytes) -> tuple[bytes, bytes]:
    private = z85.encode(hmac.digest(secret, b"ascend-kv-connector " + use, "sha256"))
    return zmq.curve_public(private), private
