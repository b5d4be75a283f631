# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fetching of transfers from one producer's ranks, in a thread of the consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from time import monotonic
from typing import Any, NamedTuple, Protocol

import torch
from ascend_platform.transfer.auth import CurveKeys
from ascend_platform.transfer.engine import Engine, Runs
from ascend_platform.transfer.errors import TransferError, never, printable
from ascend_platform.transfer.memory import ReceiveBuffers
from ascend_platform.transfer.peers import CircuitBreaker
from ascend_platform.transfer.rpc import ClientPool, NotYetError, RpcClient
from msgspec.structs import replace

from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p import protocol
from ascend_kv_connector.p2p.paged_cache import (
    FetchPlan,
    Heads,
    PagedCache,
    in_chunks,
    plan_fetches,
)
from ascend_kv_connector.p2p.protocol import (
    MAX_BLOCKS,
    CacheInfo,
    Chunk,
    Confirm,
    Fetch,
    Finish,
    Handshake,
    Locate,
    Located,
    Message,
    Query,
    Release,
    Renew,
)
from ascend_kv_connector.p2p.push_receiver import PushReceiver, PushStop
from ascend_kv_connector.p2p.runs import Placement, plan_runs
from ascend_kv_connector.p2p.send_buffers import checksum
from ascend_kv_connector.p2p.transfers import Failed, Source, Transfer

MAX_LAYERWISE_POLL = 0.005
"""Longest pause in seconds between fetches of a prompt that is being computed."""

LANE_SECONDS = 0.1
"""Seconds for which a transfer whose prompt is not ready keeps its thread from others; then it is
queued again."""

DIRECT_BYTES = 128 << 20
"""Bytes of a read of exposed KV cache; each is confirmed, and then counts if a later one fails."""

WHOLE_TRANSFER = -1
"""Key in ``written_until`` for the transfer as a whole, where partial results do not count."""


class Notice(NamedTuple):
    """Message for all ranks of a source, or for ``ranks`` of them."""

    source: Source
    message: Finish | Release | Renew
    ranks: tuple[tuple[str, int], ...] = ()


class Rank(Protocol):
    """What a fetcher uses of :class:`~ascend_kv_connector.p2p.consumer.Consumer`."""

    cache: PagedCache
    memory: list[tuple[int, int]]
    transport: Engine
    options: Options
    model: str
    weights: str
    rank: int
    reader: str
    keys: CurveKeys | None
    context: Any
    stream_context: Callable[..., AbstractContextManager]
    buffers: ReceiveBuffers
    unpackers: ThreadPoolExecutor

    def breaker(self, source: Source) -> CircuitBreaker: ...

    def finish_message(self, source: Source) -> Finish: ...

    def release_message(self, transfer: Transfer, *tickets: int) -> Release: ...

    def try_later(self, transfer: Transfer) -> bool: ...

    def ask_again(self, stop: PushStop) -> None: ...

    def may_write_directly(self) -> bool: ...


class Fetcher:
    """One thread's connections to the ranks of a producer. A chunk is read while another thread
    unpacks the one before."""

    def __init__(self, consumer: Rank) -> None:
        self._consumer = consumer
        self._unpacking: Future[None] | None = None
        self._caches: dict[tuple[str, int], tuple[CacheInfo, int]] = {}
        options = consumer.options
        self._clients = ClientPool(
            protocol.CODEC,
            consumer.context,
            options.answer_timeout,
            consumer.keys,
            self._forget_cache,
        )

    def run(self, work: Transfer | Notice | PushStop) -> None:
        if isinstance(work, Transfer):
            self._run_transfer(work)
        elif isinstance(work, PushStop):
            work.ask(self._clients, self._consumer.options.answer_timeout)
        else:
            self._post(work)

    def close(self) -> None:
        self._clients.close_idle(0.0)

    def _run_transfer(self, transfer: Transfer) -> None:
        assert transfer.source is not None
        transport, block_size = self._consumer.transport.name, self._consumer.cache.block_size
        breaker, sent = self._consumer.breaker(transfer.source), self._clients.sent
        began = monotonic()
        transfer.phases.setdefault("queue", began - transfer.started)
        if refusal := breaker.refusal():
            transfer.fail(TransferError("peer", refusal), transport, block_size)
            return
        try:
            self._fetch(transfer)
            breaker.note_success()
            transfer.messages = self._clients.sent - sent
            transfer.succeed()
        except Exception as error:
            # Chunks read before the error count; a second error is ignored.
            with suppress(Exception):
                self._wait_unpacked()
            if isinstance(error, NotYetError) and self._consumer.try_later(transfer):
                return
            # After a TransferEndedError, fail() below has no effect.
            if not isinstance(error, TransferError):
                error = TransferError("internal", f"{type(error).__name__}: {error}")
            elif error.kind == "peer":
                breaker.note_failure(str(error), began)
            transfer.fail(error, transport, block_size)
        if transfer.layerwise:
            self._post(Notice(transfer.source, self._consumer.finish_message(transfer.source)))
        elif isinstance(transfer.outcome, Failed):
            self._post(Notice(transfer.source, self._consumer.release_message(transfer)))
        if isinstance(transfer.outcome, Failed) and transfer.outcome.kind != "aborted":
            self._disconnect(transfer.source)

    def _fetch(self, transfer: Transfer) -> None:
        assert transfer.source is not None
        with transfer.phase("connect"):
            peers = [self._handshake(transfer, rank) for rank in range(len(transfer.source.ranks))]
        cache = self._consumer.cache
        chunk = min(self._consumer.options.chunk_bytes, *(peer.chunk_bytes for peer in peers))
        plans = in_chunks(plan_fetches(cache, peers, self._consumer.rank), cache, chunk)
        firsts = [
            cache.first_needed_token(transfer.start, transfer.stop, plan.group) for plan in plans
        ]
        transfer.total = sum(
            (transfer.stop - first) * cache.token_bytes(plan.local, plan.heads.num)
            for first, plan in zip(firsts, plans, strict=True)
        )
        if transfer.layerwise:
            pushes = PushReceiver(self._consumer, self._clients)
            if all(pushes.can_push(transfer, plan, peers[plan.rank]) for plan in plans):
                pushes.receive(transfer, plans)
            else:
                self._fetch_layerwise(transfer, plans, peers)
            return
        transfer.written_until = dict.fromkeys(range(len(plans)), transfer.start)
        # The request fails as a whole: vLLM does not accept single invalid blocks with several KV
        # cache groups.
        if cache.is_hybrid:
            transfer.written_until[WHOLE_TRANSFER] = transfer.start
        for part, (first, plan) in enumerate(zip(firsts, plans, strict=True)):
            if first < transfer.stop:
                peer = peers[plan.rank]
                direct = (
                    peer.memory
                    and plan.heads == Heads(peer.first_head, peer.heads)
                    and not self._consumer.options.verify
                )
                if not direct or not self._read_cache(transfer, part, first, plan, peer):
                    self._fetch_from_rank(transfer, part, first, plan, peer)
        self._wait_unpacked()

    def _read_cache(
        self, transfer: Transfer, part: int, begin: int, plan: FetchPlan, peer: CacheInfo
    ) -> bool:
        """Read all tokens from ``begin`` on from the peer's exposed KV cache, piece by piece; False
        if they are in too many runs and should be packed.

        What was read counts once the peer confirms that the blocks were the request's all the time.
        """
        consumer, cache, source = self._consumer, self._consumer.cache, transfer.source
        assert source is not None
        if (transfer.stop - begin) // peer.block_size >= MAX_BLOCKS:
            return False
        client = self._clients.get(source.ranks[plan.rank])
        transfer.peer = client.peer
        located = _ask(
            client,
            transfer,
            Locate(source.request, consumer.reader, begin, transfer.stop, plan.remote),
        )
        if not isinstance(located, Located):
            raise TransferError("mismatch", f"unexpected reply to Locate: {type(located).__name__}")
        memory, tokens = [peer.memory[index] for index in plan.remote], range(begin, transfer.stop)
        remote = cache.placement(
            memory, peer.block_tokens, peer.block_size, located.blocks, tokens, plan.group
        )
        sizes, local = (
            cache.token_sizes(plan.local, plan.heads.num),
            self._own_placement(transfer, plan, begin, transfer.stop),
        )
        each = (DIRECT_BYTES if local else consumer.options.chunk_bytes) // sum(sizes)
        if not each:
            return False
        for first in range(begin, transfer.stop, each):
            stop = min(first + each, transfer.stop)
            piece = remote.piece(first - begin, stop - begin)
            target = (
                local.piece(first - begin, stop - begin)
                if local
                else Placement.packed(0, stop - first, sizes)
            )
            runs = plan_runs(piece, target, sizes)
            if first == begin and len(runs.size) > consumer.transport.most_runs * len(sizes):
                return False
            if local:
                self._read_into_cache(transfer, peer.session, runs, transfer.deadline)
                _ask(client, transfer, Confirm(source.request, located.lease, runs.total))
                transfer.count(part, runs.total, stop)
            else:
                buffer = self._read_into_buffer(transfer, peer.session, runs, transfer.deadline)
                try:
                    _ask(client, transfer, Confirm(source.request, located.lease, runs.total))
                    self._wait_unpacked()
                    work = (transfer, part, plan, first, stop, buffer, runs.total)
                    self._unpacking = consumer.unpackers.submit(self._unpack, *work)
                except Exception:
                    consumer.buffers.release(buffer)
                    raise
        return True

    def _own_placement(
        self, transfer: Transfer, plan: FetchPlan, start: int, stop: int
    ) -> Placement | None:
        """Where the tokens belong, if a read may write them there; otherwise they are staged.

        With several KV cache groups, vLLM takes note of a failure only when the blocks may be
        freed, which a failed read delays.
        """
        cache, memory = self._consumer.cache, self._consumer.memory
        if (
            not memory
            or plan.heads != cache.heads
            or cache.is_hybrid
            or not self._consumer.may_write_directly()
        ):
            return None
        slots = cache.slot_mapping(
            transfer.blocks, start - transfer.start, stop - transfer.start, plan.group
        )
        return Placement([memory[index] for index in plan.local], cache.block_tokens, slots.numpy())

    def _read_into_cache(self, transfer: Transfer, session: str, runs: Runs, until: float) -> None:
        transfer.wait_until_writable(self._consumer.stream_context)
        with transfer.reading():
            self._read(transfer, session, runs, until)

    def _read_into_buffer(
        self, transfer: Transfer, session: str, runs: Runs, until: float
    ) -> torch.Tensor:
        """A receive buffer with the bytes of runs whose local addresses are relative to it; the
        caller releases it."""
        consumer = self._consumer
        buffer = consumer.buffers.acquire(transfer.remaining)
        runs = runs._replace(local=[buffer.data_ptr() + offset for offset in runs.local])
        try:
            self._read(transfer, session, runs, until)
        except Exception as error:
            consumer.buffers.quarantine(buffer, getattr(error, "settled", never))
            raise
        return buffer

    def _read(self, transfer: Transfer, session: str, runs: Runs, until: float) -> None:
        with transfer.phase("read"):
            self._consumer.transport.read(
                session, runs, max(0.0, min(transfer.deadline, until) - monotonic())
            )

    def _fetch_from_rank(
        self, transfer: Transfer, part: int, begin: int, plan: FetchPlan, peer: CacheInfo
    ) -> None:
        """Fetch all tokens from ``begin`` on according to a plan; the next chunk is requested while
        one is read."""
        assert transfer.source is not None
        client = self._clients.get(transfer.source.ranks[plan.rank])
        transfer.peer = client.peer
        each = self._tokens_per_chunk(plan, peer)
        fetches = [
            self._make_fetch(transfer, plan, first, each)
            for first in range(begin, transfer.stop, each)
        ]
        number = client.send(fetches[0])
        for index, fetch in enumerate(fetches):
            transfer.remaining()
            with transfer.phase("wait"):
                retry = None if index else LANE_SECONDS
                chunk = _expect_chunk(
                    client.await_reply(
                        number, fetch, transfer.deadline, retry, check=transfer.remaining
                    )
                )
            until = client.sent_at + chunk.seconds
            if index + 1 < len(fetches):
                number = client.send(fetches[index + 1])
            self._read_chunk(transfer, part, plan, fetch, chunk, peer.session, until)

    def _fetch_layerwise(
        self, transfer: Transfer, plans: list[FetchPlan], peers: list[CacheInfo]
    ) -> None:
        """Fetch a prompt during its prefill: the tokens that are ready, layer after layer, until
        all are fetched."""
        consumer, source = self._consumer, transfer.source
        assert source is not None
        regions = consumer.cache.regions
        by_layer: dict[tuple[int, str], FetchPlan] = {}
        for plan in plans:
            for remote, local in zip(plan.remote, plan.local, strict=True):
                layer_plan = by_layer.setdefault(
                    (plan.rank, regions[local].layer), plan._replace(remote=[], local=[])
                )
                layer_plan.remote.append(remote)
                layer_plan.local.append(local)
        layer_plans = sorted(by_layer.values(), key=lambda plan: plan.local)
        transfer.written_until = dict.fromkeys(range(len(layer_plans)), transfer.start)
        at = [transfer.start] * len(layer_plans)
        pending = deque(range(len(layer_plans)))

        def ask(part: int) -> tuple[Fetch, RpcClient, int]:
            plan = layer_plans[part]
            client = self._clients.get(source.ranks[plan.rank])
            each = self._tokens_per_chunk(plan, peers[plan.rank])
            fetch = self._make_fetch(transfer, plan, at[part], each)
            return fetch, client, client.send(fetch)

        asked = ask(pending[0])
        while pending:
            left = transfer.remaining()
            part = pending.popleft()
            plan, (fetch, client, number) = layer_plans[part], asked
            transfer.peer = client.peer
            with transfer.phase("wait"):
                deadline, check = transfer.deadline, transfer.remaining
                chunk = _expect_chunk(
                    client.await_reply(number, fetch, deadline, left, MAX_LAYERWISE_POLL, check)
                )
            until = client.sent_at + chunk.seconds
            if not fetch.start < chunk.stop <= fetch.stop:
                raise TransferError(
                    "mismatch",
                    f"the peer sent tokens up to {chunk.stop} for {fetch.start} to {fetch.stop}",
                )
            if chunk.stop < transfer.stop:
                # full chunk: more may be ready
                (pending.appendleft if chunk.stop == fetch.stop else pending.append)(part)
            at[part] = chunk.stop
            if pending:
                asked = ask(pending[0])
            got = replace(fetch, stop=chunk.stop)
            self._read_chunk(transfer, part, plan, got, chunk, peers[plan.rank].session, until)
        self._wait_unpacked()

    def _tokens_per_chunk(self, plan: FetchPlan, peer: CacheInfo) -> int:
        chunk_bytes = min(peer.chunk_bytes, self._consumer.options.chunk_bytes)
        each = chunk_bytes // self._consumer.cache.token_bytes(plan.local, plan.heads.num)
        if not each:
            raise TransferError(
                "mismatch", "one token is larger than a chunk", "raise chunk_mib on both instances"
            )
        return each

    def _make_fetch(self, transfer: Transfer, plan: FetchPlan, first: int, each: int) -> Fetch:
        assert transfer.source is not None
        return Fetch(
            request=transfer.source.request,
            reader=self._consumer.reader,
            rank=self._consumer.rank,
            transfer=transfer.request,
            start=first,
            stop=min(first + each, transfer.stop),
            regions=plan.remote,
            first_head=plan.heads.first,
            heads=plan.heads.num,
            verify=self._consumer.options.verify,
            allow_partial=transfer.layerwise,
        )

    def _read_chunk(
        self,
        transfer: Transfer,
        part: int,
        plan: FetchPlan,
        fetch: Fetch,
        chunk: Chunk,
        session: str,
        until: float,
    ) -> None:
        """Read a chunk, into the cache if all heads are in it; otherwise it is unpacked while the
        next one is read."""
        consumer, cache = self._consumer, self._consumer.cache
        expected = (fetch.stop - fetch.start) * cache.token_bytes(plan.local, fetch.heads)
        if chunk.size != expected:
            raise TransferError(
                "mismatch", f"the peer sent a chunk of {chunk.size} bytes instead of {expected}"
            )
        sizes = cache.token_sizes(plan.local, fetch.heads)
        local = (
            self._own_placement(transfer, plan, fetch.start, fetch.stop)
            if not fetch.verify
            else None
        )
        packed = Placement.packed(chunk.address, fetch.stop - fetch.start, sizes)
        runs = (
            plan_runs(packed, local, sizes) if local else Runs([chunk.address], [0], [chunk.size])
        )
        if local and len(runs.size) > consumer.transport.most_runs * len(sizes):
            local, runs = None, Runs([chunk.address], [0], [chunk.size])
        buffer = None
        if local:
            self._read_into_cache(transfer, session, runs, until)
        else:
            buffer = self._read_into_buffer(transfer, session, runs, until)
        try:
            # Reserve before anything is awaited: readers that each hold one peer's buffer and wait
            # for another's would deadlock.
            assert transfer.source is not None
            self._clients.get(transfer.source.ranks[plan.rank]).post(
                consumer.release_message(transfer, chunk.ticket)
            )
            if monotonic() >= until:
                cause = (
                    f"reading a chunk took longer than the {chunk.seconds:g} s for which the peer"
                    " kept it"
                )
                raise TransferError("lease", cause)
            if buffer is None:
                transfer.count(part, chunk.size, fetch.stop)
                return
            self._wait_unpacked()
            crc = chunk.checksum if fetch.verify else None
            work = (transfer, part, plan, fetch.start, fetch.stop, buffer, chunk.size, crc)
            self._unpacking = consumer.unpackers.submit(self._unpack, *work)
        except Exception:
            if buffer is not None:
                consumer.buffers.release(buffer)
            raise

    def _unpack(
        self,
        transfer: Transfer,
        part: int,
        plan: FetchPlan,
        start: int,
        stop: int,
        buffer: torch.Tensor,
        size: int,
        crc: int | None = None,
    ) -> None:
        """Copy ``size`` bytes of a receive buffer to the cache, and release the buffer."""
        cache, data = self._consumer.cache, buffer[:size]
        try:
            if crc is not None and checksum(data) != crc:
                raise TransferError("verify", f"a chunk of {size} bytes failed its checksum")
            with (
                transfer.phase("unpack"),
                transfer.writing(),
                self._consumer.stream_context(transfer.after),
            ):
                slots = cache.slot_mapping(
                    transfer.blocks, start - transfer.start, stop - transfer.start, plan.group
                )
                cache.unpack(slots, plan.local, plan.heads, data)
        finally:
            self._consumer.buffers.release(buffer)
        transfer.copied += size
        transfer.count(part, size, stop)

    def _wait_unpacked(self) -> None:
        """Wait for the chunk that is being unpacked, if any.

        Raises:
            TransferError: its checksum was wrong.
            TransferEndedError: the transfer has ended.
        """
        unpacking, self._unpacking = self._unpacking, None
        if unpacking is not None:
            unpacking.result()

    def _handshake(self, transfer: Transfer, rank: int) -> CacheInfo:
        """CacheInfo of a producer's rank, requested once per connection."""
        assert transfer.source is not None
        transfer.remaining()
        address = transfer.source.ranks[rank]
        transfer.peer = f"{address[0]}:{address[1]}"
        client = self._clients.get(address)
        known, connection = self._caches.get(address, (None, 0))
        if (
            known is None
            or known.engine != transfer.source.engine
            or connection != client.connection_count()
        ):
            answer = client.call(
                Handshake(protocol.VERSION, transfer.source.engine), transfer.deadline
            )
            if not isinstance(answer, CacheInfo):
                raise TransferError(
                    "mismatch", f"unexpected reply to Handshake: {type(answer).__name__}"
                )
            if (
                answer.model != self._consumer.model
                or answer.transport != self._consumer.transport.name
            ):
                here = f"{self._consumer.model} by {self._consumer.transport.name}"
                raise TransferError(
                    "mismatch",
                    f"the peer serves {printable(answer.model)} by {printable(answer.transport)},"
                    f" this instance {here}",
                )
            if (
                answer.weights
                and self._consumer.weights
                and answer.weights != self._consumer.weights
            ):
                raise TransferError(
                    "mismatch",
                    f"the peer's weights of {self._consumer.model} have fingerprint"
                    f" {printable(answer.weights)}, this instance's {self._consumer.weights}",
                    "the checkpoint has changed since one of them started: restart it",
                )
            known = answer
            self._caches[address] = known, client.connection_count()
        return known

    def _forget_cache(self, address: tuple[str, int]) -> None:
        self._caches.pop(address, None)

    def _disconnect(self, source: Source) -> None:
        """Drop the connections to a producer and its CacheInfo: another process may use the address
        next time."""
        for address in source.ranks:
            self._clients.close(address)

    def _post(self, notice: Notice) -> None:
        """Send a message to ranks of a producer without waiting; a rank that does not receive it
        keeps the blocks until the lease expires."""
        for address in notice.ranks or notice.source.ranks:
            try:
                self._clients.get(address).send(notice.message)
            except TransferError:
                # A client that was refused once, also by a paused peer, stays refused.
                self._clients.close(address)


def _ask(client: RpcClient, transfer: Transfer, query: Query) -> Message:
    with transfer.phase("wait"):
        return client.await_reply(
            client.send(query), query, transfer.deadline, LANE_SECONDS, check=transfer.remaining
        )


def _expect_chunk(answer: Message) -> Chunk:
    if not isinstance(answer, Chunk):
        raise TransferError("mismatch", f"unexpected reply to Fetch: {type(answer).__name__}")
    return answer
