"""Control protocol between the ranks of two instances: msgpack messages over ZMQ.

A consumer's rank sends queries and a producer's rank replies to each with one message; PrefillStarted and PrefillCancelled go the
other way. A rank that exposes its KV cache sends its addresses in CacheInfo; readers ask where a request is (Locate), read
them, and ask whether it had them all the time (Confirm). Otherwise a producer packs tokens into a buffer of its own and sends the
buffer's address (Fetch). A message's ``tag`` is its name on the wire.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VERSION = 3
"""Protocol version; both instances must have the same."""

LONGEST_MESSAGE = 1 << 20
"""Bytes; a longer message closes its connection (ZMQ_MAXMSGSIZE)."""


Name = Annotated[str, msgspec.Meta(max_length=512)]
"""Id of an engine or a request; a limit, because peers' ids are remembered."""

MAX_RANKS = 1024
"""Ranks of an instance."""

Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of all messages; ``tag`` identifies the type."""


class Handshake(Message, frozen=True, tag="Hello"):
    """Start of a connection, for the given engine, "" for any. Reply: CacheInfo, or Refused by another engine or version."""

    version: int
    engine: str


class CacheRegion(msgspec.Struct, frozen=True):
    """One KV cache tensor of a layer: ``part`` is its name there, such as ``key``, ``size`` the elements per head and token."""

    layer: str
    part: str
    size: int


class CacheInfo(Message, frozen=True, tag="Cache"):
    """KV cache of a rank: of each region, heads ``first_head`` to ``first_head + heads`` of the model's ``total_heads``.

    ``weights`` is a fingerprint of the model's weights; "" if the rank does not have the checkpoint's files. ``memory`` is where
    the regions are, as (address, bytes from one block to the next), with ``block_tokens`` tokens in a block; empty if the cache
    is not exposed. ``block_size`` is the scheduler's. ``accepts_push``: the rank answers Push.
    """

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
    weights: str = ""
    block_size: int = 0
    block_tokens: int = 0
    memory: list[tuple[int, int]] = []
    accepts_push: bool = False


class Locate(Message, frozen=True):
    """Where tokens ``start`` to ``stop`` of a request are in ``regions``, of one KV cache group. Reply: Located or Refused."""

    request: Name
    reader: Name
    start: int
    stop: int
    regions: list[int]


class Located(Message, frozen=True):
    """``blocks`` of a request, of which the first holds token ``start``. ``lease`` identifies the lease that keeps them."""

    lease: int
    blocks: list[int]


class Confirm(Message, frozen=True):
    """``size`` bytes of a request were read since its blocks were located. Reply: Ack if ``lease`` has kept them, or Refused."""

    request: Name
    lease: int
    size: int


class Push(Message, frozen=True):
    """Write tokens ``start`` to ``stop`` of a request to a reader's KV cache while they are computed. Reply: Pushed, at the end.

    ``regions`` are indices into CacheInfo.regions; ``memory`` is where they are at the reader, whose ``session`` is its
    transport's, and ``blocks`` its blocks, of which the first holds token ``start``. A rank of the reader holds the same heads.
    """

    request: Name
    reader: Name
    rank: Rank
    transfer: Name
    start: int
    stop: int
    regions: list[int]
    session: str
    memory: list[tuple[int, int]]
    block_tokens: int
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    blocks: list[int]


class Pushed(Message, frozen=True):
    """All tokens of a Push were written, ``size`` bytes."""

    size: int


class Fetch(Message, frozen=True, rename={"allow_partial": "growing"}):
    """Pack tokens ``start`` to ``stop`` of a request into a chunk. Reply: Chunk or Refused.

    Of each of ``regions`` (indices into CacheInfo.regions), heads ``first_head`` to ``first_head + heads``. ``reader`` is the
    reading engine, ``rank`` its rank, ``transfer`` its own request, which has one Fetch at a time. With ``allow_partial`` the
    reply may have fewer tokens: those that are computed.
    """

    request: Name
    reader: Name
    rank: Rank
    transfer: Name
    start: int
    stop: int
    regions: list[int]
    first_head: int
    heads: int
    verify: bool = False
    allow_partial: bool = False


class Chunk(Message, frozen=True):
    """A packed chunk: ``[regions][tokens, heads, size]`` without padding, ``size`` bytes at ``address``, tokens up to ``stop``.

    ``ticket`` identifies this loan of the buffer. The reader owns the buffer for ``seconds`` after the reply was sent, hence at
    least as long after it sent the query: measured on its own clock from before the query, data read in that time is valid.
    """

    ticket: int
    address: int
    size: int
    stop: int
    seconds: float
    checksum: int | None = None


class Release(Message, frozen=True):
    """A transfer does not read the chunks of these ``tickets`` any more, and without tickets none at all. Reply: Ack."""

    request: Name
    reader: Name
    rank: Rank
    transfer: Name
    tickets: list[int] = []


class Finish(Message, frozen=True):
    """Rank ``rank`` of the ``ranks`` of engine ``reader`` needs the request no more. Reply: Ack, also when repeated."""

    request: Name
    reader: Name
    rank: Rank
    ranks: Rank


class Renew(Message, frozen=True):
    """A request of engine ``reader`` waits to read: the lease begins anew. Reply: Ack, also if there is none."""

    request: Name
    reader: Name


class PrefillStarted(Message, frozen=True, tag="Announce"):
    """A producer started the prefill that the receiver waits for as ``request``. Reply: Ack.

    Engine ``source_engine`` runs it as ``source_request``; its ranks listen at ``ranks``.
    """

    request: Name
    source_engine: Name
    source_request: Name
    ranks: Annotated[list[tuple[Name, int]], msgspec.Meta(max_length=MAX_RANKS)]


class PrefillCancelled(Message, frozen=True, tag="Dropped"):
    """No producer will run the prefill that the receiver waits for as ``request``. Reply: Ack."""

    request: Name
    cause: str


class Connect(Message, frozen=True, tag="Meet"):
    """HCCL transport, on a port of its own: establish a link with ``reader``, a link's name. Reply: RootInfo."""

    reader: str


class RootInfo(Message, frozen=True, tag="Meeting"):
    """HCCL root info; the replying side is rank 0, the reader rank 1."""

    info: bytes


class Send(Message, frozen=True):
    """HCCL transport: send these runs of registered memory to ``reader``, which receives them next. Reply: Ack.

    The send may take ``seconds``.
    """

    reader: str
    addresses: list[int]
    sizes: list[int]
    seconds: float


class Disconnect(Message, frozen=True, tag="Part"):
    """HCCL transport: ``reader`` receives nothing more. Reply: Ack."""

    reader: str


class Ack(Message, frozen=True, tag="Noted"):
    pass


class Refused(Message, frozen=True):
    """Negative reply. ``again``: the same query may succeed a moment later; ``kind`` is one of errors.KINDS.

    ``queued``: it keeps its place in the peer's queue if it is repeated at once.
    """

    kind: str
    cause: str
    again: bool = False
    queued: bool = False


Query = (
    Handshake
    | Locate
    | Confirm
    | Push
    | Fetch
    | Release
    | Finish
    | Renew
    | PrefillStarted
    | PrefillCancelled
    | Connect
    | Send
    | Disconnect
)
Reply = CacheInfo | Located | Pushed | Chunk | Ack | Refused | RootInfo

encode = msgspec.msgpack.Encoder().encode
decode_query = msgspec.msgpack.Decoder(Query).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
