"""Consumer side of a rank: threads that fetch tokens of requests from a producer's ranks and unpack them into local blocks."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from time import monotonic
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from ascend_kv_connector import protocol
from ascend_kv_connector.auth import CurveKeys
from ascend_kv_connector.buffers import allocate_buffer, checksum
from ascend_kv_connector.config import Options
from ascend_kv_connector.errors import QUARANTINE_SECONDS, TransferError, printable
from ascend_kv_connector.leases import BoundedDict
from ascend_kv_connector.paged_cache import FetchPlan, PagedCache, plan_fetches
from ascend_kv_connector.protocol import (
    Ack,
    CacheInfo,
    Chunk,
    Fetch,
    Finish,
    Handshake,
    PrefillCancelled,
    PrefillStarted,
    Query,
    Refused,
    Release,
    Reply,
)
from ascend_kv_connector.rpc import IDLE_SECONDS, ClientPool, RpcClient, RpcServer, make_context
from ascend_kv_connector.transfers import Done, Failed, Source, Transfer
from ascend_kv_connector.transport import Transport

MAX_LAYERWISE_POLL = 0.005
"""Longest pause in seconds between fetches of a prompt that is being computed."""

WHOLE_TRANSFER = -1
"""Key in ``written_until`` for the transfer as a whole, where partial results do not count."""

BUFFERS_OF_LANE = 2
"""Receive buffers of a lane."""

MAX_QUARANTINED = 64
"""Further ones in quarantine after failed reads, 1 GiB with chunks of 16 MiB."""

MAX_STUCK_THREADS = 16
"""Threads that may be stuck in reads; beyond that, stuck threads are not replaced."""


class Notice(NamedTuple):
    """Message for all ranks of a source."""

    source: Source
    message: Finish | Release


class Consumer:
    """Rank ``rank`` of ``ranks`` of a consumer instance.

    ``stream_context(event)`` is entered around all device work, in the unpack threads: it runs after the event and has completed
    on exit.
    """

    def __init__(
        self,
        cache: PagedCache,
        transport: Transport,
        options: Options,
        engine: str,
        model: str,
        rank: int = 0,
        ranks: int = 1,
        stream_context: Callable[..., AbstractContextManager] = nullcontext,
        host: str = "127.0.0.1",
        port: int = 0,
        keys: CurveKeys | None = None,
        trusts: Callable[[str], bool] = lambda host: True,
        weights: str = "",
    ) -> None:
        """``trusts(host)``: whether a producer's host, which announces itself, may be contacted. ``weights`` as in CacheInfo."""
        self.cache, self.transport, self.options = cache, transport, options
        self.weights = weights
        self.model, self.rank, self.ranks, self.reader = model, rank, ranks, engine
        self.stream_context, self.keys, self._trusts = stream_context, keys, trusts
        self.context = make_context()
        self.work_queue: queue.SimpleQueue[Transfer | Notice | None] = queue.SimpleQueue()
        self._transfers: dict[str, Transfer] = {}
        self._quarantined: list[tuple[float, torch.Tensor]] = []
        self._buffers, self._most_buffers = 0, BUFFERS_OF_LANE * options.lanes + MAX_QUARANTINED
        self._lock = threading.Lock()
        self._threads = [FetchThread(self) for _ in range(options.lanes)]
        self._stuck: list[FetchThread] = []
        # PrefillStarted received before the request, and requests that ended before it
        self._announced: BoundedDict[Source] = BoundedDict(256)
        self._unannounced: BoundedDict[None] = BoundedDict()
        self.server = RpcServer(self.answer, host, port, keys)

    def start(self, request: str, source: Source | None, blocks: list[int], start: int, stop: int, after: Any = None) -> None:
        """Fetch tokens ``start`` to ``stop`` into ``blocks``; :meth:`get_finished` reports the outcome.

        The blocks are written after the event ``after``, if given. Without a source the transfer starts when a producer sends
        PrefillStarted, proceeds layer by layer, and releases the producer's blocks at its end. Otherwise other requests may load
        from the source too, until :meth:`release`.
        """
        transfer = Transfer(request, source, blocks, start, stop, self.options.transfer_timeout, after)
        with self._lock:
            self._transfers[request] = transfer
            if source is None:
                transfer.source = self._announced.pop(request, None)
        if transfer.source is not None:
            self.work_queue.put(transfer)

    def answer(self, query: Query) -> Reply:
        """Reply to a producer's query."""
        if isinstance(query, PrefillCancelled):
            self.cancel_unstarted(query.request, f"the prefill instance cancelled it: {printable(query.cause)}")
            return Ack()
        if not isinstance(query, PrefillStarted):
            return Refused("mismatch", "this rank is a consumer only")
        if not all(self._trusts(host) for host, _ in query.ranks):
            return Refused("mismatch", "the decode instance's option peers does not have this prefill instance's hosts")
        source = Source(query.source_engine, query.source_request, tuple((host, port) for host, port in query.ranks))
        with self._lock:
            transfer = self._transfers.get(query.request)
            if query.request in self._unannounced or (transfer and transfer.source not in (None, source)):
                self.release(source)  # no longer needed, or computed twice (n > 1)
            elif transfer is None:
                self._announced[query.request] = source
            elif transfer.source is None:
                transfer.source = source
                self.work_queue.put(transfer)
        return Ack()

    def cancel(self, request: str, error: TransferError) -> None:
        """Fail a transfer, unless it has ended; :meth:`get_finished` reports it, and nothing more is written."""
        if transfer := self._transfers.get(request):
            transfer.fail(error, self.transport.name, self.cache.block_size)

    def cancel_unstarted(self, request: str, cause: str) -> None:
        """Fail a transfer that has no producer yet."""
        if (transfer := self._transfers.get(request)) and transfer.source is None:
            self.cancel(request, TransferError("peer", cause, "check the logs of the router and the prefill instance"))

    def release(self, source: Source) -> None:
        """Tell the producer that this rank does not need the request's blocks any more."""
        self.work_queue.put(Notice(source, self.finish_message(source)))

    def finish_message(self, source: Source) -> Finish:
        return Finish(source.request, self.reader, self.rank, self.ranks)

    def release_chunks(self, transfer: Transfer) -> None:
        """Tell the producer that a transfer does not read any more; without effect for a layer-by-layer transfer's blocks."""
        assert transfer.source is not None
        self.work_queue.put(Notice(transfer.source, self.release_message(transfer)))

    def release_message(self, transfer: Transfer, *tickets: int) -> Release:
        assert transfer.source is not None
        return Release(transfer.source.request, self.reader, self.rank, transfer.request, list(tickets))

    def get_finished(self) -> list[Done | Failed]:
        """Transfers that ended since the last call. Fails those whose deadline has passed."""
        now = monotonic()
        self._stuck = [worker for worker in self._stuck if worker.thread.is_alive()]
        for transfer in list(self._transfers.values()):
            if transfer.deadline <= now and transfer.outcome is None:
                self._expire(transfer)
        with self._lock:
            ended = {name: transfer.outcome for name, transfer in self._transfers.items() if transfer.outcome is not None}
            for name in ended:
                if self._transfers.pop(name).source is None:
                    self._unannounced[name] = None
        return list(ended.values())

    def close(self) -> None:
        self.server.close()
        for worker in self._threads:
            worker.stop = True
            self.work_queue.put(None)
        for worker in self._threads:
            worker.thread.join(2)
        if not any(worker.thread.is_alive() for worker in [*self._threads, *self._stuck]):
            self.context.destroy(linger=0)  # a running thread still uses it

    def get_buffer(self) -> torch.Tensor:
        """A registered buffer: one whose quarantine is over, or a new one.

        Raises:
            TransferError: too many are in quarantine.
        """
        with self._lock:
            for index, (until, buffer) in enumerate(self._quarantined):
                if until <= monotonic():
                    del self._quarantined[index]
                    return buffer
            if self._buffers >= self._most_buffers:
                raise TransferError(
                    "transport",
                    f"{self._buffers} receive buffers are still in use or in quarantine after failed reads, which is the most",
                )
            self._buffers += 1
        return allocate_buffer(self.transport, self.options.chunk_bytes, self.cache.device)

    def quarantine(self, buffer: torch.Tensor, seconds: float = QUARANTINE_SECONDS) -> None:
        with self._lock:
            self._quarantined.append((monotonic() + seconds, buffer))

    def _expire(self, transfer: Transfer) -> None:
        error = TransferError("deadline", f"the deadline of {transfer.seconds:g} s has passed")
        if transfer.source is None:
            error = TransferError("peer", f"no prefill instance started the prompt in {transfer.seconds:g} s")
        transfer.fail(error, self.transport.name, self.cache.block_size)
        if transfer.source is not None:  # its thread may be stuck and not release it
            (self.release(transfer.source) if transfer.layerwise else self.release_chunks(transfer))
        for index, worker in enumerate(self._threads):
            if worker.transfer is transfer and len(self._stuck) < MAX_STUCK_THREADS:
                worker.stop = True
                self._stuck.append(worker)
                self._threads[index] = FetchThread(self)


class FetchThread:
    """Thread with connections to producers' ranks and two buffers: one is read into while another thread unpacks the other."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._buffers: deque[torch.Tensor] = deque()
        with suppress(TransferError):  # a transfer reports it
            self._fill_buffers()
        self._unpacker = ThreadPoolExecutor(1, "kv-unpack")
        self._unpacking: Future[None] | None = None
        self._caches: dict[tuple[str, int], tuple[CacheInfo, int]] = {}
        options = consumer.options
        self._clients = ClientPool(consumer.context, options.answer_timeout, consumer.keys, self._forget_cache)
        self.transfer: Transfer | None = None
        self.stop = False
        self.thread = threading.Thread(target=self._run, name="kv-fetch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stop:
            try:
                work = self._consumer.work_queue.get(timeout=IDLE_SECONDS / 2)
            except queue.Empty:
                self._clients.close_idle()
                continue
            if isinstance(work, Transfer):
                self.transfer = work
                self._run_transfer(work)
                self.transfer = None
            elif work is not None:
                self._post(work)
        self._unpacker.shutdown(wait=False)
        for buffer in self._buffers:
            self._consumer.quarantine(buffer)
        self._clients.close_idle(0.0)

    def _run_transfer(self, transfer: Transfer) -> None:
        assert transfer.source is not None
        transport, block_size = self._consumer.transport.name, self._consumer.cache.block_size
        try:
            self._fetch(transfer)
            transfer.succeed()
        except Exception as error:
            with suppress(Exception):  # chunks read before the error count; a second error is ignored
                self._wait_unpacked()
            if not isinstance(error, TransferError):  # after a TransferEndedError, fail() below has no effect
                error = TransferError("internal", f"{type(error).__name__}: {error}")
            transfer.fail(error, transport, block_size)
        if transfer.layerwise:
            self._post(Notice(transfer.source, self._consumer.finish_message(transfer.source)))
        elif isinstance(transfer.outcome, Failed):
            self._post(Notice(transfer.source, self._consumer.release_message(transfer)))
        if isinstance(transfer.outcome, Failed) and transfer.outcome.kind != "aborted":
            self._disconnect(transfer.source)

    def _fetch(self, transfer: Transfer) -> None:
        assert transfer.source is not None
        peers = [self._handshake(transfer, rank) for rank in range(len(transfer.source.ranks))]
        plans = plan_fetches(self._consumer.cache, peers, self._consumer.rank)
        cache = self._consumer.cache
        firsts = [cache.first_needed_token(transfer.start, transfer.stop, plan.group) for plan in plans]
        transfer.total = sum(
            (transfer.stop - first) * cache.token_bytes(plan.local, plan.heads.num)
            for first, plan in zip(firsts, plans, strict=True)
        )
        if transfer.layerwise:
            self._fetch_layerwise(transfer, plans, peers)
            return
        transfer.written_until = dict.fromkeys(range(len(plans)), transfer.start)
        if cache.is_hybrid:  # fails as a whole: vLLM does not accept single invalid blocks with several KV cache groups
            transfer.written_until[WHOLE_TRANSFER] = transfer.start
        for part, (first, plan) in enumerate(zip(firsts, plans, strict=True)):
            if first < transfer.stop:
                self._fetch_from_rank(transfer, part, first, plan, peers[plan.rank])
        self._wait_unpacked()

    def _fetch_from_rank(self, transfer: Transfer, part: int, begin: int, plan: FetchPlan, peer: CacheInfo) -> None:
        """Fetch all tokens from ``begin`` on according to a plan; the next chunk is requested while one is read."""
        assert transfer.source is not None
        client = self._clients.get(transfer.source.ranks[plan.rank])
        transfer.peer = client.peer
        each = self._tokens_per_chunk(plan, peer)
        fetches = [self._make_fetch(transfer, plan, first, each) for first in range(begin, transfer.stop, each)]
        asked = monotonic()
        number = client.send(fetches[0])
        for index, fetch in enumerate(fetches):
            transfer.remaining()
            chunk = _expect_chunk(client.await_reply(number, fetch, transfer.deadline, check=transfer.remaining))
            until = asked + chunk.seconds
            if index + 1 < len(fetches):
                asked = monotonic()
                number = client.send(fetches[index + 1])
            self._read_chunk(transfer, part, plan, fetch, chunk, peer.session, until)

    def _fetch_layerwise(self, transfer: Transfer, plans: list[FetchPlan], peers: list[CacheInfo]) -> None:
        """Fetch a prompt during its prefill: the tokens that are ready, layer after layer, until all are fetched."""
        consumer, source = self._consumer, transfer.source
        assert source is not None
        regions = consumer.cache.regions
        by_layer: dict[tuple[int, str], FetchPlan] = {}
        for plan in plans:
            for remote, local in zip(plan.remote, plan.local, strict=True):
                layer_plan = by_layer.setdefault((plan.rank, regions[local].layer), plan._replace(remote=[], local=[]))
                layer_plan.remote.append(remote)
                layer_plan.local.append(local)
        layer_plans = sorted(by_layer.values(), key=lambda plan: plan.local)
        transfer.written_until = dict.fromkeys(range(len(layer_plans)), transfer.start)
        at = [transfer.start] * len(layer_plans)
        pending = deque(range(len(layer_plans)))

        def ask(part: int) -> tuple[Fetch, RpcClient, int, float]:
            plan = layer_plans[part]
            client = self._clients.get(source.ranks[plan.rank])
            each = self._tokens_per_chunk(plan, peers[plan.rank])
            fetch = self._make_fetch(transfer, plan, at[part], each)
            return fetch, client, client.send(fetch), monotonic()

        asked = ask(pending[0])
        while pending:
            left = transfer.remaining()
            part = pending.popleft()
            plan, (fetch, client, number, since) = layer_plans[part], asked
            transfer.peer = client.peer
            chunk = _expect_chunk(
                client.await_reply(
                    number, fetch, transfer.deadline, retry_seconds=left, max_pause=MAX_LAYERWISE_POLL, check=transfer.remaining
                )
            )
            if not fetch.start < chunk.stop <= fetch.stop:
                raise TransferError("mismatch", f"the peer sent tokens up to {chunk.stop} for {fetch.start} to {fetch.stop}")
            if chunk.stop < transfer.stop:
                (pending.appendleft if chunk.stop == fetch.stop else pending.append)(part)  # full chunk: more may be ready
            at[part] = chunk.stop
            if pending:
                asked = ask(pending[0])
            got = replace(fetch, stop=chunk.stop)
            self._read_chunk(transfer, part, plan, got, chunk, peers[plan.rank].session, since + chunk.seconds)
        self._wait_unpacked()

    def _tokens_per_chunk(self, plan: FetchPlan, peer: CacheInfo) -> int:
        chunk_bytes = min(peer.chunk_bytes, self._consumer.options.chunk_bytes)
        each = chunk_bytes // self._consumer.cache.token_bytes(plan.local, plan.heads.num)
        if not each:
            raise TransferError("mismatch", "one token is larger than a chunk", "raise chunk_mib on both instances")
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
        self, transfer: Transfer, part: int, plan: FetchPlan, fetch: Fetch, chunk: Chunk, session: str, until: float
    ) -> None:
        """Read a chunk; it is unpacked while the next one is read, and then counts as written."""
        consumer, cache = self._consumer, self._consumer.cache
        expected = (fetch.stop - fetch.start) * cache.token_bytes(plan.local, fetch.heads)
        if chunk.size != expected:
            raise TransferError("mismatch", f"the peer sent a chunk of {chunk.size} bytes instead of {expected}")
        seconds = max(0.0, min(transfer.remaining(), until - monotonic()))
        self._fill_buffers()
        buffer = self._buffers.popleft()
        try:
            consumer.transport.read(session, chunk.address, buffer.data_ptr(), chunk.size, seconds)
        except Exception as error:
            if duration := getattr(error, "quarantine", QUARANTINE_SECONDS):
                consumer.quarantine(buffer, duration)
            else:
                self._buffers.append(buffer)
            raise
        self._buffers.append(buffer)
        # before anything is awaited: readers that each hold one peer's buffer and wait for another's would deadlock
        assert transfer.source is not None
        self._clients.get(transfer.source.ranks[plan.rank]).post(consumer.release_message(transfer, chunk.ticket))
        if monotonic() >= until:
            raise TransferError("lease", f"reading a chunk took longer than the {chunk.seconds:g} s for which the peer kept it")
        self._wait_unpacked()
        self._unpacking = self._unpacker.submit(self._unpack_chunk, transfer, part, plan, fetch, chunk, buffer[: chunk.size])

    def _unpack_chunk(
        self, transfer: Transfer, part: int, plan: FetchPlan, fetch: Fetch, chunk: Chunk, data: torch.Tensor
    ) -> None:
        cache = self._consumer.cache
        if fetch.verify and checksum(data) != chunk.checksum:
            raise TransferError("verify", f"a chunk of {chunk.size} bytes failed its checksum")
        with transfer.writing(), self._consumer.stream_context(transfer.after):
            slots = cache.slot_mapping(transfer.blocks, fetch.start - transfer.start, fetch.stop - transfer.start, plan.group)
            cache.unpack(slots, plan.local, plan.heads, data)
        transfer.size += chunk.size
        transfer.written_until[part] = fetch.stop

    def _fill_buffers(self) -> None:
        while len(self._buffers) < BUFFERS_OF_LANE:
            self._buffers.append(self._consumer.get_buffer())

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
        if known is None or known.engine != transfer.source.engine or connection != client.connection_count():
            answer = client.call(Handshake(protocol.VERSION, transfer.source.engine), transfer.deadline)
            if not isinstance(answer, CacheInfo):
                raise TransferError("mismatch", f"unexpected reply to Handshake: {type(answer).__name__}")
            if answer.model != self._consumer.model or answer.transport != self._consumer.transport.name:
                here = f"{self._consumer.model} by {self._consumer.transport.name}"
                raise TransferError(
                    "mismatch",
                    f"the peer serves {printable(answer.model)} by {printable(answer.transport)}, this instance {here}",
                )
            if answer.weights and self._consumer.weights and answer.weights != self._consumer.weights:
                raise TransferError(
                    "mismatch",
                    f"the peer's weights of {self._consumer.model} have fingerprint {printable(answer.weights)}, this instance's "
                    f"{self._consumer.weights}",
                    "the checkpoint has changed since one of them started: restart it",
                )
            known = answer
            self._caches[address] = known, client.connection_count()
        return known

    def _forget_cache(self, address: tuple[str, int]) -> None:
        self._caches.pop(address, None)

    def _disconnect(self, source: Source) -> None:
        """Drop the connections to a producer and its CacheInfo: another process may use the address next time."""
        for address in source.ranks:
            self._clients.close(address)

    def _post(self, notice: Notice) -> None:
        """Send a message to all ranks of a producer without waiting; a rank that does not receive it keeps the blocks until the
        lease expires."""
        for address in notice.source.ranks:
            with suppress(TransferError):
                self._clients.get(address).send(notice.message)


def _expect_chunk(answer: Reply) -> Chunk:
    if not isinstance(answer, Chunk):
        raise TransferError("mismatch", f"unexpected reply to Fetch: {type(answer).__name__}")
    return answer
