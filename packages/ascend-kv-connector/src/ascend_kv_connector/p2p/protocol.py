# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Control protocol between the ranks of two instances: msgpack messages over ZMQ.

A consumer's rank sends queries and a producer's rank replies to each with one message;
PrefillStarted and PrefillCancelled go the other way. A rank that exposes its KV cache sends its
addresses in CacheInfo; readers ask where a request is (Locate), read the blocks, and ask whether it
kept them all the time (Confirm). Otherwise a producer packs tokens into a buffer of its own and sends
the buffer's address (Fetch). A message's name on the wire is that of its class.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from ascend_transfer.messages import Ack, Codec, Message, Refused

VERSION = 5
"""Protocol version; both instances must have the same."""

MAX_NAME = 512
"""Characters of an id; a limit, because peers' ids are remembered."""

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
"""Id of an engine or a request."""

MAX_RANKS = 1024
"""Ranks of an instance."""

MAX_BLOCKS = 200_000
"""Blocks that a message may name: 5 bytes each at most, of 1 MiB."""

RankIndex = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Owner(NamedTuple):
    """A transfer of a reader: its engine and rank, the producer's request that it reads, and its
    own request."""

    request: str
    reader: str
    rank: int
    transfer: str


class Handshake(Message, frozen=True):
    """Start of a connection, for the given engine, "" for any. Reply: CacheInfo, or Refused by
    another engine or version."""

    version: int
    engine: str


class CacheRegion(msgspec.Struct, frozen=True):
    """One KV cache tensor of a layer: ``part`` is its name there, such as ``key``, ``size`` the
    elements per head and token."""

    layer: str
    part: str
    size: Count


class CacheInfo(Message, frozen=True):
    """KV cache of a rank: of each region, heads ``first_head`` to ``first_head + heads`` of the
    model's ``total_heads``.

    ``weights`` is a fingerprint of the model's weights; "" if the rank does not have the
    checkpoint's files. ``memory`` is where the regions are, as (address, bytes from one block to
    the next), with ``block_tokens`` tokens in a block; empty if the cache is not exposed.
    ``block_size`` is the size in the scheduler. ``accepts_push``: the rank answers Push. ``tp`` is the
    tensor-parallel rank and their number.
    """

    version: int
    engine: str
    model: str
    dtype: str
    transport: str
    session: str
    total_heads: Count
    first_head: Index
    heads: Count
    chunk_bytes: Count
    regions: list[CacheRegion]
    block_size: Count
    block_tokens: Count
    weights: str = ""
    memory: list[tuple[Address, Index]] = msgspec.field(default_factory=list)
    accepts_push: bool = False
    tp: tuple[Index, Count] = (0, 1)


class Locate(Message, frozen=True):
    """Where tokens ``start`` to ``stop`` of a request are in ``regions``, of one KV cache group.
    Reply: Located or Refused."""

    request: Name
    reader: Name
    start: int
    stop: int
    regions: list[int]


class Located(Message, frozen=True):
    """``blocks`` of a request; the first holds token ``start``. ``lease`` identifies the
    lease that keeps them."""

    lease: int
    blocks: list[Index]


class Confirm(Message, frozen=True):
    """``size`` bytes of a request were read since its blocks were located. Reply: Ack if ``lease``
    has kept them, or Refused."""

    request: Name
    lease: int
    size: int


class TransferQuery(Message, frozen=True):
    """Base of queries for a transfer: of ``reader``, an engine, its rank ``rank`` and its own
    request ``transfer``."""

    request: Name
    reader: Name
    rank: RankIndex
    transfer: Name

    @property
    def owner(self) -> Owner:
        return Owner(self.request, self.reader, self.rank, self.transfer)


class TokensQuery(TransferQuery, frozen=True):
    """Base of queries for tokens ``start`` to ``stop`` of ``regions``, indices into
    CacheInfo.regions."""

    start: int
    stop: int
    regions: list[int]


class Push(TokensQuery, frozen=True):
    """Write tokens of a request to a reader's KV cache while they are computed. Reply: Pushed, at
    the end.

    ``memory`` is where the regions are at the reader, ``session`` that of its engine, and
    ``blocks`` its blocks; the first holds token ``start``. A rank of the reader holds the
    same heads.
    """

    session: str
    memory: list[tuple[int, int]]
    block_tokens: int
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    blocks: list[int]


class Pushed(Message, frozen=True):
    """All tokens of a Push were written, ``size`` bytes."""

    size: int


class Fetch(TokensQuery, frozen=True):
    """Pack tokens of a request into a chunk. Reply: Chunk or Refused.

    Of each region, heads ``first_head`` to ``first_head + heads``. A transfer has one Fetch at a
    time. With ``allow_partial`` the reply may have fewer tokens: those that are computed.
    """

    first_head: int
    heads: int
    verify: bool = False
    allow_partial: bool = False


class Chunk(Message, frozen=True):
    """A packed chunk: ``[regions][tokens, heads, size]`` without padding, ``size`` bytes at
    ``address``, tokens up to ``stop``.

    ``ticket`` identifies this loan of the buffer. The reader owns the buffer for ``seconds`` after
    the reply was sent, hence at least as long after it sent the query: measured on its own clock
    from before the query, data read in that time is valid.
    """

    ticket: int
    address: int
    size: int
    stop: int
    seconds: float
    checksum: int | None = None


class Release(TransferQuery, frozen=True):
    """A transfer does not read the chunks of these ``tickets`` any more, and without tickets none
    at all. Reply: Ack."""

    tickets: list[int] = msgspec.field(default_factory=list)


class Finish(Message, frozen=True):
    """Rank ``rank`` of the ``ranks`` of engine ``reader`` needs the request no more. Reply: Ack,
    also when repeated."""

    request: Name
    reader: Name
    rank: RankIndex
    ranks: RankIndex


class Renew(Message, frozen=True):
    """A request of engine ``reader`` waits to read: the lease begins anew. Reply: Ack, also if
    there is none."""

    request: Name
    reader: Name


class PrefillStarted(Message, frozen=True):
    """A producer started the prefill that the receiver waits for as ``request``. Reply: Ack.

    Engine ``source_engine`` runs it as ``source_request``; its ranks listen at ``ranks``.
    """

    request: Name
    source_engine: Name
    source_request: Name
    ranks: Annotated[list[tuple[Name, int]], msgspec.Meta(max_length=MAX_RANKS)]


class PrefillCancelled(Message, frozen=True):
    """No producer will run the prefill that the receiver waits for as ``request``. Reply: Ack."""

    request: Name
    cause: str


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
)
Reply = CacheInfo | Located | Pushed | Chunk | Ack | Refused

CODEC = Codec(Query, Reply)
