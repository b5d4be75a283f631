"""Frames between engines: a fixed prefix, a header that is decoded strictly, and raw bytes behind it.

A frame is ``AWP1``, the header's length (4 bytes) and the payload's (8 bytes), both in network order, the header in MessagePack,
once both sides have proved that they know the secret the header's HMAC-SHA256 (32 bytes), and the payload. Lengths are compared
with what can be expected before anything is read or allocated. Headers are decoded by msgspec into the types below and nothing
else: there is no pickle, and no name of a type or function is taken from the network.
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

MAGIC = b"AWP1"
PREFIX = struct.Struct("!4sIQ")
TIMEVAL = struct.Struct("@ll")
MAC_BYTES = 32
NONCE_BYTES = 32
MAX_HEADER_BYTES = 4096
"""Bytes of a header, of those that are not a manifest."""
MAX_MANIFEST_BYTES = 64 << 20
"""Bytes of a manifest."""


class PeerError(Exception):
    """What was asked of a peer, or by one, cannot be; the message is one line."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The header of a frame."""


class Challenge(Message, frozen=True):
    """The server begins."""

    nonce: bytes


class Answer(Message, frozen=True):
    """The client has the secret: ``proof`` is made of both nonces with it."""

    nonce: bytes
    proof: bytes


class Welcome(Message, frozen=True):
    """So has the server."""

    proof: bytes


class GetManifest(Message, frozen=True, tag="Ask"):
    """For the manifest."""


class GetChunks(Message, frozen=True, tag="Get"):
    """For the chunks ``first`` to ``last - 1``."""

    first: int
    last: int


class Chunk(Message, frozen=True, tag="Piece"):
    """One chunk, which is the payload, or comes by the transport that was asked for."""

    index: int


class UseTransport(Message, frozen=True, tag="Over"):
    """For another transport than TCP, on this connection; the answer is one of the next two."""

    transport: str


class ReadableRegion(Message, frozen=True, tag="Region"):
    """Mooncake: the session and the address where chunks can be read."""

    session: str
    address: int


class RootInfo(Message, frozen=True, tag="Meeting"):
    """HCCL: its root information, of some 4 KiB, with which the server connects as rank 0."""

    info: bytes


class Refused(Message, frozen=True):
    """The server does not go on, and why."""

    reason: str


class Manifest(Message, frozen=True, tag="Described", rename={"chunk_bytes": "piece"}):
    """The manifest: what the weights are (``identity``), their tensors as (name, dtype, shape), and a checksum of each chunk.

    The tensors' bytes, one tensor after another in this order, are cut into chunks of ``chunk`` bytes, the last perhaps shorter.
    """

    identity: dict[str, str]
    tensors: list[tuple[str, str, list[int]]]
    chunk_bytes: int
    checksum: str
    digests: list[bytes]


M = TypeVar("M", bound=Message)


class Channel:
    """One connection, of which every wait ends: after ``timeout`` seconds without a byte, and at ``deadline`` in any case.

    The kernel counts them, and fills or empties whole buffers: in the midst of one it may be twice ``timeout``.

    Args:
        connection: connected; closed by ``close``.
        timeout: seconds.
        deadline: on ``time.monotonic``'s clock.
    """

    def __init__(self, connection: socket.socket, timeout: float, deadline: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # Python would otherwise ask for each part that has come
        self.connection, self.timeout, self.deadline = connection, timeout, deadline
        self._key = b""
        self._waits: dict[int, float] = {}
        self._sent = self._received = 0

    def close(self) -> None:
        self.connection.close()

    def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Send one frame.

        Raises:
            PeerError: the peer is gone, or does not take it in time.
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
        """The next frame's header, of one of these kinds and at most so many bytes, and the length of its payload.

        Raises:
            PeerError: it is none of these, was not made with the secret, does not come in time, or is the peer's refusal.
        """
        prefix = bytes(self.receive_bytes(PREFIX.size))
        magic, length, payload = PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise PeerError(f"a frame begins with {magic.hex()}, not with {MAGIC.hex()}: the peer does not speak this protocol")
        if length > max_size:
            raise PeerError(f"a header of {length} bytes was announced; at most {max_size} are taken here")
        header = bytes(self.receive_bytes(length))
        mac = self._mac(not self._is_server, self._received, prefix, header)
        if mac and not hmac.compare_digest(mac, bytes(self.receive_bytes(MAC_BYTES))):
            raise PeerError("a header was not made with the secret, or was changed on its way")
        self._received += 1
        try:
            message = _decoder(*kinds).decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise PeerError(f"a header is not {expected}: {printable(str(error))}") from None
        if isinstance(message, Refused):
            raise PeerError(f"it answers: {printable(message.reason)}")
        if payload and not isinstance(message, Chunk):
            raise PeerError(f"{payload} bytes were announced behind {type(message).__name__}, which has none")
        return message, payload

    def receive_bytes(self, size: int) -> memoryview:
        """So many bytes."""
        buffer = memoryview(bytearray(size))
        self.receive_into(buffer)
        return buffer

    def receive_into(self, buffer: memoryview) -> None:
        """Fill the buffer.

        Raises:
            PeerError: the peer ends before, or does not send in time.
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
                raise PeerError(f"the peer ended the connection after {filled} of {len(buffer)} bytes")
            filled += count

    @property
    def closed_by_peer(self) -> bool:
        """Whether the peer has closed the connection, and all that it sent before was received."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def wait_for(self, done: Callable[[float], bool], did: str) -> None:
        """Ask ``done`` for parts of a second until it is true, which is the transport's work.

        Raises:
            PeerError: the peer has ended meanwhile, or it took ``timeout`` seconds or the deadline has passed.
        """
        end = min(self.deadline, time.monotonic() + self.timeout)
        while not done(min(0.2, max(0.001, end - time.monotonic()))):
            if self.closed_by_peer:
                raise PeerError(f"the peer ended while a chunk was {did}")
            if time.monotonic() >= end:
                raise self._timeout_error(did)

    def authenticate_as_client(self, secret: bytes) -> None:
        """The client's side of the mutual proof.

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
            raise PeerError("it does not have this engine's secret")
        self._key = _proof(secret, b"session", nonces)

    def authenticate_as_server(self, secret: bytes) -> None:
        """The server's side.

        Raises:
            PeerError: the peer does not have this secret.
        """
        self._is_server = True
        mine = os.urandom(NONCE_BYTES)
        self.send(Challenge(mine))
        answer, _ = self.receive(Answer)
        nonces = mine + _check_nonce(answer.nonce)
        if not hmac.compare_digest(answer.proof, _proof(secret, b"client", nonces)):
            self.send(Refused("the secret is another one"))
            raise PeerError("the secret is another one")
        self.send(Welcome(_proof(secret, b"server", nonces)))
        self._key = _proof(secret, b"session", nonces)

    _is_server = False

    def _mac(self, server: bool, number: int, prefix: bytes, header: bytes) -> bytes:
        if not self._key:
            return b""
        return hmac.digest(self._key, b"%d %d " % (server, number) + prefix + header, "sha256")

    def _timeout_error(self, did: str) -> PeerError:
        past = time.monotonic() >= self.deadline
        return PeerError("the deadline has passed" if past else f"the peer {did} nothing for {self.timeout:g} s")

    def _wait(self, option: int) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self._timeout_error("")
        if (seconds := min(self.timeout, left)) != self._waits.get(option):
            self._waits[option] = seconds
            whole = int(seconds)
            self.connection.setsockopt(socket.SOL_SOCKET, option, TIMEVAL.pack(whole, max(1, int((seconds - whole) * 1e6))))


def printable(text: str) -> str:
    """What a peer has said, as one line of at most 500 characters."""
    return "".join(each if each.isprintable() else "?" for each in text[:500])


@functools.cache
def _decoder(*kinds: type[Message]) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, kinds, Refused))


def _check_nonce(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_BYTES:
        raise PeerError(f"a nonce has {len(nonce)} bytes; it needs {NONCE_BYTES}")
    return nonce


def _proof(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"ascend-model-loader " + MAGIC + b" " + label + b" " + nonces, "sha256")
