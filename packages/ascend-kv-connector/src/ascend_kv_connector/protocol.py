"""What the ranks of two instances say to each other: msgpack over zmq, each message of one of these types, nothing else.

A consumer's rank asks, a producer's rank answers each message with one. A producer asks :class:`PrefillStarted`
and :class:`PrefillCancelled`. No message holds an address of a KV cache: a producer packs what it is asked for into a buffer of its own,
and tells its address.
"""

from __future__ import annotations

import msgspec

VERSION = 1
"""Of this protocol. Two instances must have the same."""

LONGEST_MESSAGE = 1 << 20
"""Bytes; a longer one ends the connection that it came by (ZMQ_MAXMSGSIZE)."""


class Message(msgspec.Struct, tag=True, frozen=True):
    """The base of all of them; ``tag`` names the type in each message."""


class Handshake(Message, frozen=True, tag="Hello"):
    """Who are you? Answered by :class:`CacheInfo`, or :class:`Refused` where ``engine`` is another."""

    version: int
    engine: str


class CacheRegion(msgspec.Struct, frozen=True):
    """One tensor of one layer: ``part`` is ``key`` or ``value``, ``size`` the elements of a head's row."""

    layer: str
    part: str
    size: int


class CacheInfo(Message, frozen=True, tag="Cache"):
    """What a rank holds: of each region the heads ``first_head`` to ``first_head + heads`` of the model's ``total_heads``."""

    version: int
    engine: str
    model: str
    dtype: str
    transport: str
    session: str
    total_heads: int
    first_head: int
    heads: int
    chunk_bytes: int
    regions: list[CacheRegion]


class Fetch(Message, frozen=True, rename={"allow_partial": "growing"}):
    """Pack tokens ``start`` to ``stop`` of a request: of each of ``regions`` (indices into CacheInfo's) the heads ``first_head`` to
    ``first_head + heads``. ``read`` has the tickets of what the reader is done with. With ``growing`` it may be fewer tokens,
    those that are computed. Answered by :class:`Chunk` or :class:`Refused`."""

    request: str
    reader: str
    start: int
    stop: int
    regions: list[int]
    first_head: int
    heads: int
    read: list[int] = []
    verify: bool = False
    allow_partial: bool = False


class Chunk(Message, frozen=True):
    """It is packed: ``[regions][tokens, heads, size]`` without gaps, ``size`` bytes from ``address``, the tokens up to ``stop``.

    ``ticket`` names this loan of the buffer, and no other one. The buffer is the reader's for ``seconds`` from when the answer
    was sent, which is later than when it was asked for: whoever has read all by then, on a clock of its own that began before it
    asked, has read what was packed.
    """

    ticket: int
    address: int
    size: int
    stop: int
    seconds: float
    checksum: int | None = None


class Release(Message, frozen=True):
    """This reader, one of ``readers``, wants nothing more of the request. Answered by :class:`Ack`, also when repeated."""

    request: str
    reader: str
    readers: int


class PrefillStarted(Message, frozen=True, tag="Announce"):
    """A producer has begun to compute the prompt that the asked instance waits for under the name ``request``: engine
    ``source_engine`` does so as ``source_request``, and its ranks answer at ``ranks``. Answered by :class:`Ack`."""

    request: str
    source_engine: str
    source_request: str
    ranks: list[tuple[str, int]]


class PrefillCancelled(Message, frozen=True, tag="Dropped"):
    """No producer will compute the prompt that the asked instance waits for as ``request``. Answered by :class:`Ack`."""

    request: str
    cause: str


class Connect(Message, frozen=True, tag="Meet"):
    """By transport hccl, on a port of its own: connect with ``reader``, a pair's name. Answered by :class:`RootInfo`."""

    reader: str


class RootInfo(Message, frozen=True, tag="Meeting"):
    """HCCL's root information, of which the asked one is rank 0 and the reader rank 1."""

    info: bytes


class Send(Message, frozen=True):
    """Send these bytes of a registered buffer to ``reader``, which receives them next, for ``seconds`` at most. Answered by
    :class:`Ack`."""

    reader: str
    address: int
    size: int
    seconds: float


class Disconnect(Message, frozen=True, tag="Part"):
    """``reader`` receives nothing more. Answered by :class:`Ack`."""

    reader: str


class Ack(Message, frozen=True, tag="Noted"):
    pass


class Refused(Message, frozen=True):
    """No. ``again`` says that the same question may be answered a moment later; ``kind`` is one of errors.KINDS."""

    kind: str
    cause: str
    again: bool = False


Query = Handshake | Fetch | Release | PrefillStarted | PrefillCancelled | Connect | Send | Disconnect
Reply = CacheInfo | Chunk | Ack | Refused | RootInfo

encode = msgspec.msgpack.Encoder().encode
decode_query = msgspec.msgpack.Decoder(Query).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
