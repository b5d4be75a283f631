# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Producer side of a rank: keeps the blocks of finished prompts, packs the tokens that readers
fetch, and frees the blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ascend_transfer.engine import Engine
from ascend_transfer.errors import TransferError
from ascend_transfer.memory import allocate_buffer
from ascend_transfer.query_queue import BusyError, QueryQueue
from ascend_transfer.rpc import RpcServer

from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p import protocol
from ascend_kv_connector.p2p.paged_cache import (
    Heads,
    PagedCache,
    checksum,
    expose,
    group_block_table,
)
from ascend_kv_connector.p2p.peers import PeerQueues
from ascend_kv_connector.p2p.producer.leases import Lease, Leases, NotReadyError
from ascend_kv_connector.p2p.producer.pusher import Job, Pusher, PushJobs, Steps
from ascend_kv_connector.p2p.producer.send_buffers import SendBuffers
from ascend_kv_connector.p2p.protocol import (
    Ack,
    CacheInfo,
    Chunk,
    Confirm,
    Fetch,
    Finish,
    Handshake,
    Locate,
    Located,
    Owner,
    Push,
    Pushed,
    Query,
    Refused,
    Release,
    Renew,
    Reply,
)
from ascend_kv_connector.p2p.rank import RankContext
from ascend_kv_connector.p2p.states import LAST_STATE

MAX_PUSHES = 32
"""Prompts that are written to one rank at once; each has a thread while it is computed."""


class Producer:
    """One rank that others read from; ``leases`` is its bookkeeping, ``server`` receives queries,
    and packs in its thread."""

    def __init__(
        self,
        rank: RankContext,
        cache: PagedCache,
        transport: Engine,
        options: Options,
        port: int | range = 0,
    ) -> None:
        self.rank, self.cache, self.transport, self.options = rank, cache, transport, options
        self.leases = Leases()
        self.sent_bytes = self.copied_bytes = 0
        self._waiting, self.steps = QueryQueue(options.answer_timeout / 2), Steps()
        self.memory = expose(cache, transport, options)
        self._queues: PeerQueues[Job] = PeerQueues(
            "kv-push", lambda: Pusher(self, options.answer_timeout, self._pushes.begin)
        )
        self._pushes = PushJobs(
            lambda job: self._queues.put((job.push.reader, job.push.rank), job, MAX_PUSHES)
        )
        self._buffers = SendBuffers(
            [
                allocate_buffer(transport, options.chunk_bytes, cache.device)
                for _ in range(options.slots)
            ]
        )
        self._cache_info = CacheInfo(
            version=protocol.VERSION,
            engine=rank.engine,
            model=rank.model,
            dtype=str(cache.dtype).removeprefix("torch."),
            transport=transport.name,
            session=transport.session,
            total_heads=cache.total_heads,
            first_head=cache.heads.first,
            heads=cache.heads.num,
            chunk_bytes=options.chunk_bytes,
            regions=cache.regions,
            weights=rank.weights,
            block_size=cache.block_size,
            block_tokens=cache.block_tokens,
            memory=self.memory,
            accepts_push=bool(self.memory) and transport.can_write,
            tp=cache.tp,
        )
        self.server = RpcServer(
            protocol.CODEC, self.answer, rank.host, port, rank.keys, self._waiting
        )

    @property
    def buffers_in_use(self) -> int:
        """Number of buffers lent to readers."""
        return self._buffers.in_use

    def gauges(self) -> dict[str, float]:
        """Resources that this rank holds for readers, by name of the metric."""
        return {
            "leases": len(self.leases),
            "oldest_lease_seconds": round(self.leases.oldest(), 1),
            "send_buffers_in_use": self._buffers.in_use,
            "fetches_waiting": len(self._waiting),
        }

    def answer(self, query: Query) -> Reply:
        """Reply to a query.

        Raises:
            TransferError: the query is invalid or failed.
            BusyError: a Fetch has to wait for a buffer.
        """
        match query:
            case Handshake(version=version, engine=engine):
                if version != protocol.VERSION:
                    versions = f"the peer has protocol {protocol.VERSION}, this instance {version}"
                    return Refused(
                        "mismatch",
                        f"{versions}; install the same ascend-kv-connector on both sides",
                    )
                if engine not in ("", self._cache_info.engine):
                    return Refused(
                        "peer",
                        f"engine {self._cache_info.engine} listens at this address instead of"
                        f" engine {engine}",
                    )
                return self._cache_info
            case Locate():
                return self._locate(query)
            case Confirm(request=request, lease=lease, size=size):
                self.leases.confirm(request, lease)
                self.sent_bytes += size
            case Push():
                return self._push(query)
            case Fetch():
                return self._fetch(query)
            case Release(owner=owner, tickets=tickets):
                self._buffers.release(owner, tickets)
                if not tickets:
                    self._pushes.stop(owner)
                    self._waiting.remove(lambda key: key == owner)
            case Finish(request=request, reader=reader, rank=rank, ranks=ranks):
                self._buffers.release_request(request, reader, rank)
                self._waiting.remove(
                    lambda key: (
                        len(key) == len(Owner._fields) and key[:3] == (request, reader, rank)
                    )
                )
                self.leases.finish(request, reader, rank, ranks)
            case Renew(request=request, reader=reader):
                self.leases.renew(request, reader)
                self._pushes.heard(request, reader)
            case _:
                return Refused("mismatch", "this rank is a producer only")
        return Ack()

    def push_ended(self) -> None:
        """The reply to a push is there."""
        self._waiting.changed = True

    def use_lease(self, request: str, reader: str) -> AbstractContextManager[Lease]:
        return self.leases.use(request, reader)

    def close(self) -> None:
        self._queues.close(2.0)
        self.server.close()

    def _locate(self, query: Locate) -> Reply:
        if not self._cache_info.memory:
            return Refused("mismatch", "the prefill instance does not expose its KV cache")
        try:
            with self.leases.use(query.request, query.reader) as lease:
                self._check(query, lease.tokens)
                if not lease.finished or lease.ready_tokens(self._layers(query)) < query.stop:
                    raise NotReadyError("the request's blocks are still being written")
                group = self.cache.region_groups[query.regions[0]]
                # This raises unless all tokens are in the window.
                self.cache.slot_mapping(lease.blocks, query.start, query.stop, group)
                table = group_block_table(lease.blocks, group, len(self.cache.windows))
                columns = slice(
                    query.start // self.cache.block_size, -(-query.stop // self.cache.block_size)
                )
                return Located(lease.number, list(table[columns]))
        except NotReadyError as error:
            return Refused("lease", str(error), again=True)

    def _push(self, push: Push) -> Reply:
        known = self._are_regions(push.regions)
        needed = -(-push.stop // push.block_size) - push.start // push.block_size
        if not (self._cache_info.accepts_push and known and 0 <= push.start < push.stop):
            return Refused(
                "mismatch", "invalid push, or the prefill instance does not expose its KV cache"
            )
        address = push.session.partition("/")[0]
        # Mooncake has a default port
        if not self.rank.trusts((address.rpartition(":")[0] or address).strip("[]")):
            return Refused(
                "mismatch",
                "the prefill instance's option peers does not have this decode instance's host",
            )
        if (
            len(push.memory) != len(push.regions)
            or len(push.blocks) < needed
            or self.cache.is_hybrid
        ):
            return Refused(
                "mismatch",
                f"invalid push: {len(push.memory)} regions, {len(push.blocks)} blocks of {needed}",
            )
        reply = self._pushes.answer(push.owner, push)
        self.sent_bytes += reply.size if isinstance(reply, Pushed) else 0
        return reply

    def _are_regions(self, indices: list[int]) -> bool:
        """Whether a query names regions, each once: repeated ones would cost more launches."""
        return (
            bool(indices)
            and len(set(indices)) == len(indices)
            and all(0 <= each < len(self.cache.regions) for each in indices)
        )

    def _layers(self, query: Fetch | Locate) -> set[str]:
        return {self.cache.regions[index].layer for index in query.regions}

    def _fetch(self, fetch: Fetch) -> Reply:
        owner = fetch.owner
        try:
            with self.leases.use(fetch.request, fetch.reader) as lease:
                self._check(fetch, lease.tokens)
                self._check_size(fetch)
                ready = lease.ready_tokens(self._layers(fetch))
                if ready <= fetch.start or (ready < fetch.stop and not fetch.allow_partial):
                    raise NotReadyError("the request's blocks are still being written")
                stop = min(fetch.stop, ready)
                seconds = 3 * self.options.answer_timeout
                loan = (
                    self._buffers.acquire(owner, seconds) if self._waiting.is_next(owner) else None
                )
                if loan is None:
                    raise BusyError(
                        owner, f"all {len(self._buffers.buffers)} send buffers are in use"
                    )
                ticket, buffer = loan
                try:
                    with self.rank.stream_context():
                        group = self.cache.region_groups[fetch.regions[0]]
                        slots = self.cache.slot_mapping(lease.blocks, fetch.start, stop, group)
                        size = self.cache.pack(
                            slots, fetch.regions, Heads(fetch.first_head, fetch.heads), buffer
                        )
                    lease.raise_if_revoked()
                except Exception:
                    self._buffers.release(owner, [ticket])
                    raise
        except NotReadyError as error:
            return Refused("lease", str(error), again=True)
        self.sent_bytes += size
        self.copied_bytes += size
        crc = checksum(buffer[:size]) if fetch.verify else None
        return Chunk(ticket, buffer.data_ptr(), size, stop, seconds, crc)

    def _check(self, query: Fetch | Locate, tokens: int) -> None:
        """Reject a query outside the lease or the cache, whoever sends it."""
        if not 0 <= query.start < query.stop <= tokens:
            raise TransferError(
                "mismatch",
                f"invalid fetch: tokens {query.start} to {query.stop} of a prompt of {tokens}",
            )
        if not self._are_regions(query.regions):
            raise TransferError(
                "mismatch", f"invalid fetch: regions {query.regions} of {len(self.cache.regions)}"
            )
        window = self.cache.windows[self.cache.region_groups[query.regions[0]]]
        if window == LAST_STATE and (query.start, query.stop) != (tokens - 1, tokens):
            raise TransferError(
                "mismatch",
                f"invalid fetch: the state after token {query.stop}; there is that after {tokens}",
            )
        partial = isinstance(query, Fetch) and query.allow_partial
        if self.cache.is_hybrid and (
            partial or len({self.cache.region_groups[index] for index in query.regions}) > 1
        ):
            raise TransferError(
                "mismatch",
                "the prefill instance has several KV cache groups, which are read separately after"
                " the prefill; give both instances --disable-hybrid-kv-cache-manager or neither"
                " (mode push needs it)",
            )

    def _check_size(self, fetch: Fetch) -> None:
        wanted = Heads(fetch.first_head, fetch.heads)
        if fetch.heads < 1 or self.cache.heads.intersection(wanted) != wanted:
            raise TransferError("mismatch", f"invalid fetch: heads {wanted} of {self.cache.heads}")
        size = (fetch.stop - fetch.start) * self.cache.token_bytes(fetch.regions, fetch.heads)
        if size > self.options.chunk_bytes:
            raise TransferError(
                "mismatch", f"invalid fetch: {size} bytes; a chunk has {self.options.chunk_bytes}"
            )
