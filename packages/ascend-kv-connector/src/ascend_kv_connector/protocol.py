"""What the ranks of two instances say to each other: msgpack over zmq, each message of one of these types, nothing else.

A consumer's rank asks, a producer's rank answers each message with one. A producer asks :class:`Announce`
and :class:`Dropped`. No message holds an address of a KV cache: a producer packs what it is asked for into a buffer of its own,
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


class Hello(Message, frozen=True):
    """Who are you? Answered by :class:`Cache`, or :class:`Refused` where ``engine`` is another."""

    version: int
    engine: str


class Region(msgspec.Struct, frozen=True):
    """One tensor of one layer: ``part`` is ``key`` or ``value``, ``size`` the elements of a head's row."""

    layer: str
    part: str
    size: int


class Cache(Message, frozen=True):
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
    regions: list[Region]


class Fetch(Message, frozen=True):
    """Pack tokens ``start`` to ``stop`` of a request: of each of ``regions`` (indices into Cache's) the heads ``first_head`` to
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
    growing: bool = False


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
    """This reader, one of ``readers``, wants nothing more of the request. Answered by :class:`Noted`, also when repeated."""

    request: str
    reader: str
    readers: int


class Announce(Message, frozen=True):
    """A producer has begun to compute the prompt that the asked instance waits for under the name ``request``: engine
    ``source_engine`` does so as ``source_request``, and its ranks answer at ``ranks``. Answered by :class:`Noted`."""

    request: str
    source_engine: str
    source_request: str
    ranks: list[tuple[str, int]]


class Dropped(Message, frozen=True):
    """No producer will compute the prompt that the asked instance waits for as ``request``. Answered by :class:`Noted`."""

    request: str
    cause: str


class Meet(Message, frozen=True):
    """By transport hccl, on a port of its own: connect with ``reader``, a pair's name. Answered by :class:`Meeting`."""

    reader: str


class Meeting(Message, frozen=True):
    """HCCL's root information, of which the asked one is rank 0 and the reader rank 1."""

    info: bytes


class Send(Message, frozen=True):
    """Send these bytes of a registered buffer to ``reader``, which receives them next, for ``seconds`` at most. Answered by
    :class:`Noted`."""

    reader: str
    address: int
    size: int
    seconds: float


class Part(Message, frozen=True):
    """``reader`` receives nothing more. Answered by :class:`Noted`."""

    reader: str


class Noted(Message, frozen=True):
    pass


class Refused(Message, frozen=True):
    """No. ``again`` says that the same question may be answered a moment later; ``kind`` is one of errors.KINDS."""

    kind: str
    cause: str
    again: bool = False


Question = Hello | Fetch | Release | Announce | Dropped | Meet | Send | Part
Answer = Cache | Chunk | Noted | Refused | Meeting

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
