# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Wire format between engines: length-prefixed frames with a strictly decoded header and a raw
payload.

A frame is ``AWP1``, the header's length (4 bytes) and the payload's (8 bytes), both in network byte
order, the header in MessagePack, after the handshake the header's HMAC-SHA256 (32 bytes), and the
payload. Lengths are checked against what is expected before anything is read or allocated. Headers
are decoded by msgspec into the message types below only: no pickle, and no type or function name is
taken from the network. A message's name on the wire is that of its class.
"""

import functools
import hmac
import operator
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from ascend_transfer.errors import printable

MAGIC = b"AWP1"
PREFIX = struct.Struct("!4sIQ")
TIMEVAL = struct.Struct("@ll")
MAC_BYTES = 32
NONCE_BYTES = 32
MAX_HEADER_BYTES = 4096
"""Limit of a header other than a manifest."""
MAX_MANIFEST_BYTES = 64 << 20
"""Limit of a manifest."""


class PeerError(Exception):
    """A request to or from a peer failed; the message is one line."""


class PeerBusyError(PeerError):
    """The peer has as many clients as it admits."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Header of a frame."""


class Challenge(Message, frozen=True):
    """Handshake, server to client."""

    nonce: bytes


class Answer(Message, frozen=True):
    """Handshake, client to server: ``proof`` is an HMAC of both nonces with the secret."""

    nonce: bytes
    proof: bytes


class Welcome(Message, frozen=True):
    """Handshake, server to client: the server's proof that it has the secret."""

    proof: bytes


class GetManifest(Message, frozen=True):
    """Request for the manifest."""


class GetChunks(Message, frozen=True):
    """Request for chunks ``first`` to ``last - 1``."""

    first: int
    last: int


class Chunk(Message, frozen=True):
    """Header of one chunk, which is the payload or follows by the requested transport."""

    index: int


class UseTransport(Message, frozen=True):
    """Request for a transport other than TCP on this connection; answered by ReadableRegion."""

    transport: str


class ReadableRegion(Message, frozen=True):
    """An engine's session, and the address at which chunks can be read."""

    session: str
    address: int


class Refused(Message, frozen=True, omit_defaults=True):
    """The server refuses, with the reason; ``busy`` if the same request may be granted later."""

    reason: str
    busy: bool = False


class Manifest(Message, frozen=True):
    """Manifest: identity of the weights, (name, dtype, shape) of each tensor, and a checksum of
    each chunk.

    The bytes of all tensors, concatenated in this order, are cut into chunks of ``chunk_bytes``;
    the last may be shorter.
    """

    identity: dict[str, str]
    tensors: list[tuple[str, str, list[int]]]
    chunk_bytes: int
    checksum: str
    digests: list[bytes]


M = TypeVar("M", bound=Message)


class Channel:
    """Connection with bounded waits: ``timeout`` seconds without a byte, and ``deadline`` in any
    case.

    The kernel applies the timeout to whole buffers: within one it may take twice ``timeout``.

    Args:
        connection: a connected socket; ``close`` closes it.
        timeout: seconds.
        deadline: in terms of ``time.monotonic``.
    """

    def __init__(self, connection: socket.socket, timeout: float, deadline: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # With a timeout, Python would poll before each part.
        self.connection, self.timeout, self.deadline = connection, timeout, deadline
        self._key = b""
        self._waits: dict[int, float] = {}
        self._sent = self._received = 0

    def close(self) -> None:
        self.connection.close()

    def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Send one frame.

        Raises:
            PeerError: the peer is gone, or does not read in time.
        """
        header = msgspec.msgpack.encode(message)
        prefix = PREFIX.pack(MAGIC, len(header), len(payload or b""))
        frame = prefix + header + self._mac(self._is_server, self._sent, prefix, header)
        self._sent += 1
        self._send_all([frame, payload] if payload else [frame])

    def _send_all(self, parts: list[bytes | memoryview]) -> None:
        left = sum(map(len, parts))
        while left:
            try:
                self._wait(socket.SO_SNDTIMEO)
                count = self.connection.sendmsg(parts)
            except BlockingIOError:
                raise self._timeout_error("took") from None
            except OSError as error:
                raise PeerError(f"the peer is gone: {error.strerror or error}") from None
            left -= count
            while left and count >= len(parts[0]):
                count -= len(parts.pop(0))
            parts[0] = memoryview(parts[0])[count:]

    def receive(self, *kinds: type[M], max_size: int = MAX_HEADER_BYTES) -> tuple[M, int]:
        """Receive the next frame's header, of one of ``kinds`` and at most ``max_size`` bytes.

        Returns:
            The message, and the length of its payload.

        Raises:
            PeerError: another or invalid message, a wrong HMAC, a timeout, or the peer's refusal.
        """
        prefix = bytes(self.receive_bytes(PREFIX.size))
        magic, length, payload = PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise PeerError(
                f"a frame begins with {magic.hex()} instead of {MAGIC.hex()}: the peer does not use"
                " this protocol"
            )
        if length > max_size:
            raise PeerError(
                f"the peer announced a header of {length} bytes; the limit is {max_size}"
            )
        header = bytes(self.receive_bytes(length))
        mac = self._mac(not self._is_server, self._received, prefix, header)
        if mac and not hmac.compare_digest(mac, bytes(self.receive_bytes(MAC_BYTES))):
            raise PeerError(
                "a header's HMAC is wrong: it was made with another secret, or changed in transit"
            )
        self._received += 1
        try:
            message = _decoder(*kinds).decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise PeerError(f"a header is not {expected}: {printable(str(error))}") from None
        if isinstance(message, Refused):
            raise (PeerBusyError if message.busy else PeerError)(
                f"the peer refused: {printable(message.reason)}"
            )
        if payload and not isinstance(message, Chunk):
            raise PeerError(
                f"the peer announced a payload of {payload} bytes with {type(message).__name__},"
                " which has none"
            )
        return message, payload

    def receive_bytes(self, size: int) -> memoryview:
        """Receive ``size`` bytes."""
        buffer = memoryview(bytearray(size))
        self.receive_into(buffer)
        return buffer

    def receive_into(self, buffer: memoryview) -> None:
        """Fill the buffer.

        Raises:
            PeerError: the peer closes the connection, or does not send in time.
        """
        filled = 0
        while filled < len(buffer):
            try:
                self._wait(socket.SO_RCVTIMEO)
                count = self.connection.recv_into(buffer[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise self._timeout_error("sent") from None
            except OSError as error:
                raise PeerError(f"the peer is gone: {error.strerror or error}") from None
            if not count:
                raise PeerError(
                    f"the peer closed the connection after {filled} of {len(buffer)} bytes"
                )
            filled += count

    def seconds_left(self) -> float:
        """Seconds until the deadline.

        Raises:
            PeerError: it has passed.
        """
        if (left := self.deadline - time.monotonic()) <= 0:
            raise self._timeout_error("")
        return left

    def authenticate_as_client(self, secret: bytes) -> None:
        """Client side of the mutual authentication.

        Raises:
            PeerError: the peer does not have this secret.
        """
        self._is_server = False
        challenge, _ = self.receive(Challenge)
        mine = os.urandom(NONCE_BYTES)
        nonces = _check_nonce(challenge.nonce) + mine
        self.send(Answer(mine, _proof(secret, b"client", nonces)))
        welcome, _ = self.receive(Welcome)
        if not hmac.compare_digest(welcome.proof, _proof(secret, b"server", nonces)):
            raise PeerError("the peer does not have this engine's secret")
        self._key = _proof(secret, b"session", nonces)

    def authenticate_as_server(
        self, secret: bytes, admit: Callable[[], object] = lambda: None
    ) -> None:
        """Server side of the mutual authentication. ``admit`` is called once the client has proved
        that it has the secret.

        Raises:
            PeerError: the peer does not have this secret, or is not admitted.
        """
        self._is_server = True
        mine = os.urandom(NONCE_BYTES)
        self.send(Challenge(mine))
        answer, _ = self.receive(Answer)
        nonces = mine + _check_nonce(answer.nonce)
        if not hmac.compare_digest(answer.proof, _proof(secret, b"client", nonces)):
            self.send(Refused("the secrets differ"))
            raise PeerError("the secrets differ")
        try:
            admit()
        except PeerBusyError as error:
            self.send(Refused(str(error), busy=True))
            raise
        self.send(Welcome(_proof(secret, b"server", nonces)))
        self._key = _proof(secret, b"session", nonces)

    _is_server = False

    def _mac(self, server: bool, number: int, prefix: bytes, header: bytes) -> bytes:
        if not self._key:
            return b""
        return hmac.digest(self._key, b"%d %d " % (server, number) + prefix + header, "sha256")

    def _timeout_error(self, did: str) -> PeerError:
        past = time.monotonic() >= self.deadline
        return PeerError(
            "the deadline has passed" if past else f"the peer {did} nothing for {self.timeout:g} s"
        )

    def _wait(self, option: int) -> None:
        if (seconds := min(self.timeout, self.seconds_left())) != self._waits.get(option):
            self._waits[option] = seconds
            whole = int(seconds)
            self.connection.setsockopt(
                socket.SOL_SOCKET, option, TIMEVAL.pack(whole, max(1, int((seconds - whole) * 1e6)))
            )


@functools.cache
def _decoder(*kinds: type[Message]) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, kinds, Refused))


def _check_nonce(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_BYTES:
        raise PeerError(f"a nonce has {len(nonce)} bytes; it needs {NONCE_BYTES}")
    return nonce


def _proof(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(
        secret, b"ascend-model-loader " + MAGIC + b" " + label + b" " + nonces, "sha256"
    )
