# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Consumer side of a rank: its transfers, their outcomes, and the threads that fetch them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import torch
from ascend_platform.extension import logger
from ascend_transfer.engine import Engine
from ascend_transfer.errors import TransferError, printable
from ascend_transfer.memory import ReceiveBuffers, allocate_buffer
from ascend_transfer.rpc import RpcServer, make_context

from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p.bounded import BoundedDict, EarlyMessages
from ascend_kv_connector.p2p.consumer.connections import Notice
from ascend_kv_connector.p2p.consumer.fetcher import Fetcher
from ascend_kv_connector.p2p.consumer.push_stop import PushStop
from ascend_kv_connector.p2p.paged_cache import PagedCache, expose
from ascend_kv_connector.p2p.peers import CircuitBreaker, PeerQueues
from ascend_kv_connector.p2p.protocol import (
    CODEC,
    Ack,
    Finish,
    PrefillCancelled,
    PrefillStarted,
    Query,
    Refused,
    Release,
    Renew,
    Reply,
)
from ascend_kv_connector.p2p.rank import RankContext
from ascend_kv_connector.p2p.transfers import Done, Failed, Source, Transfer

BUFFERS_OF_LANE = 2
"""Receive buffers of a lane: one is read into while the other is unpacked."""

MAX_KEPT = 1 / 8
"""Part of the KV cache's blocks that failed transfers may keep from use; beyond that, bytes of
peers go to receive buffers."""

MAX_LAYERWISE = 32
"""Prompts of one instance that are received layer by layer at once; each has a thread while it is
computed."""


TOO_EARLY = Refused("lease", "the decode instance has not allocated blocks for it", again=True)


class Consumer:
    """Reads from the ranks of other instances into this rank's cache, and has a server for the
    messages of producers."""

    def __init__(
        self,
        rank: RankContext,
        cache: PagedCache,
        transport: Engine,
        options: Options,
        port: int | range = 0,
    ) -> None:
        self.rank, self.cache, self.transport, self.options = rank, cache, transport, options
        self.zmq_context = make_context()
        self.memory = expose(cache, transport, options)
        self.buffers = ReceiveBuffers(self._allocate_buffer, BUFFERS_OF_LANE * options.lanes)
        self.unpackers = ThreadPoolExecutor(options.lanes, "kv-unpack")
        started = threading.Barrier(options.lanes)
        # Submit now: a submission that cannot start its thread still runs later.
        for _ in range(options.lanes):
            self.unpackers.submit(started.wait)
        self.breakers: BoundedDict[CircuitBreaker] = BoundedDict()
        self.queues: PeerQueues[Transfer | Notice | PushStop] = PeerQueues(
            "kv-fetch", lambda: Fetcher(self)
        )
        self._transfers: dict[str, Transfer] = {}
        self._unsettled: list[Transfer] = []  # outcome was reported
        self._is_full = False
        self._lock = threading.Lock()
        # PrefillStarted and PrefillCancelled received before the request: at most one for each block
        # of the cache.
        self._early: EarlyMessages[Source | str] = EarlyMessages(
            cache.blocks, options.transfer_timeout
        )
        # Requests that ended before either.
        self._unannounced: BoundedDict[None] = BoundedDict()
        self.server = RpcServer(CODEC, self.answer, rank.host, port, rank.keys)

    def start(
        self,
        request: str,
        source: Source | None,
        blocks: list[int],
        start: int,
        stop: int,
        after: Any = None,
    ) -> None:
        """Fetch tokens ``start`` to ``stop`` into ``blocks``; :meth:`get_finished` reports the
        outcome.

        The blocks are written after the event ``after``, if given. Without a source the transfer
        starts when a producer sends PrefillStarted, proceeds layer by layer, and releases the
        producer's blocks at its end. Otherwise other requests may load from the source too, until
        :meth:`release`.
        """
        transfer = Transfer(
            request, source, blocks, start, stop, self.options.transfer_timeout, after
        )
        with self._lock:
            self._transfers[request] = transfer
            early = self._early.pop(request) if source is None else None
            cancelled = early if isinstance(early, str) else ""
            if isinstance(early, Source):
                transfer.source = early
            # Decide here, because PrefillStarted may arrive in another thread.
            if transfer.source is not None:
                self._enqueue(transfer)
        if cancelled:
            self.cancel_unstarted(request, cancelled)

    def answer(self, query: Query) -> Reply:
        """Reply to a producer's query."""
        if isinstance(query, PrefillCancelled):
            cause = f"the prefill instance cancelled it: {printable(query.cause)}"
            with self._lock:
                if query.request not in self._transfers and not self._early.add(
                    query.request, cause
                ):
                    return TOO_EARLY
            self.cancel_unstarted(query.request, cause)
            return Ack()
        if not isinstance(query, PrefillStarted):
            return Refused("mismatch", "this rank is a consumer only")
        if not all(self.rank.trusts(host) for host, _ in query.ranks):
            return Refused(
                "mismatch",
                "the decode instance's option peers does not have this prefill instance's hosts",
            )
        source = Source(
            query.source_engine,
            query.source_request,
            tuple((host, port) for host, port in query.ranks),
        )
        with self._lock:
            transfer = self._transfers.get(query.request)
            if query.request in self._unannounced or (
                transfer and transfer.source not in (None, source)
            ):
                self.release(source)  # No longer needed, or computed twice (n > 1).
            elif transfer is None:
                if not self._early.add(query.request, source):
                    return TOO_EARLY
            elif transfer.source is None:
                transfer.source = source
                self._enqueue(transfer)
        return Ack()

    def cancel(self, request: str, error: TransferError) -> None:
        """Fail a transfer, unless it has ended; :meth:`get_finished` reports it, and nothing more
        is written."""
        if transfer := self._transfers.get(request):
            transfer.fail(error, self.transport.name, self.cache.block_size)

    def suspend(self, cause: str) -> None:
        """Fail all transfers; after that nothing is written to the KV cache, which is not exposed
        if it can sleep."""
        with self._lock:
            transfers = [
                transfer for transfer in self._transfers.values() if transfer.outcome is None
            ]
        for transfer in transfers:
            transfer.fail(TransferError("sleep", cause), self.transport.name, self.cache.block_size)
            self._release_failed(transfer)

    def cancel_unstarted(self, request: str, cause: str) -> None:
        """Fail a transfer that has no producer yet."""
        if (transfer := self._transfers.get(request)) and transfer.source is None:
            self.cancel(
                request,
                TransferError(
                    "peer", cause, "check the logs of the router and the prefill instance"
                ),
            )

    def release(self, source: Source) -> None:
        """Tell the producer that this rank does not need the request's blocks any more."""
        self._enqueue(Notice(source, self.finish_message(source)))

    def renew(self, source: Source) -> None:
        """Tell the producer that a request waits to load from a source. Each of its ranks is told
        by one rank of this instance."""
        if ranks := source.ranks[self.rank.index :: self.rank.count]:
            self._enqueue(Notice(source, Renew(source.request, self.rank.engine), ranks))

    def finish_message(self, source: Source) -> Finish:
        return Finish(source.request, self.rank.engine, self.rank.index, self.rank.count)

    def release_message(self, transfer: Transfer, *tickets: int) -> Release:
        assert transfer.source is not None
        return Release(
            transfer.source.request,
            self.rank.engine,
            self.rank.index,
            transfer.request,
            list(tickets),
        )

    def get_finished(self) -> list[Done | Failed]:
        """Transfers that ended since the last call. Fails those whose deadline has passed.

        Their blocks are kept until :meth:`pop_settled` returns them too.
        """
        now = monotonic()
        for transfer in list(self._transfers.values()):
            if transfer.deadline <= now and transfer.outcome is None:
                self._expire(transfer)
        with self._lock:
            ended = {
                name: transfer.outcome
                for name, transfer in self._transfers.items()
                if transfer.outcome is not None
            }
            for name in ended:
                transfer = self._transfers.pop(name)
                self._unsettled.append(transfer)
                if transfer.source is None:
                    self._unannounced[name] = None
        return list(ended.values())

    def pop_settled(self) -> set[str]:
        """Requests whose transfer was reported as ended and whose blocks no read can write to any
        more, since the last call."""
        settled = [transfer for transfer in self._unsettled if transfer.settled()]
        with self._lock:
            self._unsettled = [transfer for transfer in self._unsettled if transfer not in settled]
        return {transfer.request for transfer in settled}

    def gauges(self) -> dict[str, float]:
        """This rank's current loads, by name of the metric."""
        with self._lock:
            return {"transfers_open": len(self._transfers), "unsettled_blocks": self._count_kept()}

    def close(self) -> None:
        self.server.close()
        self.unpackers.shutdown(wait=False)
        if self.queues.close(2.0):
            self.zmq_context.destroy(linger=0)  # otherwise a thread still uses it

    def try_later(self, transfer: Transfer) -> bool:
        """Queue a transfer behind others, whose producer does not have the prompt yet, or has
        forgotten it; False if it has been tried for ``answer_timeout``."""
        transfer.not_ready_since = transfer.not_ready_since or monotonic()
        if again := monotonic() - transfer.not_ready_since < self.options.answer_timeout:
            self._enqueue(transfer)
        return again

    def breaker(self, source: Source) -> CircuitBreaker:
        """The circuit breaker of a producer."""
        key = f"{source.engine} {source.ranks}"
        with self._lock:
            if key not in self.breakers:
                self.breakers[key] = CircuitBreaker(self.options.answer_timeout)
            return self.breakers[key]

    def ask_again(self, stop: PushStop) -> None:
        self._enqueue(stop)

    def may_write_directly(self) -> bool:
        """Whether peers' bytes may go to the KV cache at once: not while failed transfers keep many
        blocks from use."""
        with self._lock:
            kept = self._count_kept()
        most = max(1, int(MAX_KEPT * self.cache.blocks))
        if (full := kept >= most) and not self._is_full:
            logger.error(
                "%d KV cache blocks of %d are kept from use, because failed transfers may still"
                " write to them; until they are settled, transfers go through staging buffers; fix:"
                " restart the prefill instances that do not respond",
                kept,
                self.cache.blocks,
            )
        self._is_full = full
        return not full

    def _count_kept(self) -> int:
        return sum(
            len(transfer.blocks)
            for transfer in self._unsettled
            if isinstance(transfer.outcome, Failed)
        )

    def _enqueue(self, work: Transfer | Notice | PushStop) -> None:
        assert work.source is not None
        kind, threads = "fetch", self.options.lanes
        if isinstance(work, Notice):  # does not wait for transfers
            kind, threads = "notice", 1
        elif isinstance(work, PushStop):  # This may wait for a peer that does not respond.
            kind, threads = "stop", 1
        elif work.layerwise:
            kind, threads = "layerwise", MAX_LAYERWISE
        try:
            self.queues.put((kind, work.source.engine, work.source.ranks), work, threads)
        except TransferError as error:
            if isinstance(work, Transfer):
                work.fail(error, self.transport.name, self.cache.block_size)
            elif isinstance(work, PushStop):
                work.ended()
            else:
                logger.warning(
                    "KV transfer: %s is not told that a request has ended: %s",
                    printable(work.source.engine),
                    error,
                )

    def _allocate_buffer(self) -> torch.Tensor:
        return allocate_buffer(self.transport, self.options.chunk_bytes, self.cache.device)

    def _expire(self, transfer: Transfer) -> None:
        error = TransferError("deadline", f"the deadline of {transfer.seconds:g} s has passed")
        if transfer.source is None:
            error = TransferError(
                "peer", f"no prefill instance started the prompt in {transfer.seconds:g} s"
            )
        transfer.fail(error, self.transport.name, self.cache.block_size)
        self._release_failed(transfer)
        self.queues.abandon(transfer)

    def _release_failed(self, transfer: Transfer) -> None:
        """Tell the producer, since the transfer's thread may be stuck and not do so."""
        if transfer.source is not None and transfer.layerwise:
            self.release(transfer.source)
        elif transfer.source is not None:
            self._enqueue(Notice(transfer.source, self.release_message(transfer)))
