# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fetching of transfers from one producer's ranks, in a thread of the consumer."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic

from ascend_transfer.errors import TransferError, printable
from ascend_transfer.rpc import NotYetError

from ascend_kv_connector.p2p.consumer.chunk_reader import ChunkReader
from ascend_kv_connector.p2p.consumer.connections import Connections, Notice, Part
from ascend_kv_connector.p2p.consumer.direct_reader import DirectReader
from ascend_kv_connector.p2p.consumer.push_receiver import PushReceiver
from ascend_kv_connector.p2p.consumer.push_stop import PushStop
from ascend_kv_connector.p2p.consumer.receiving import Receiving
from ascend_kv_connector.p2p.consumer.view import ConsumerView
from ascend_kv_connector.p2p.paged_cache import in_chunks, plan_fetches
from ascend_kv_connector.p2p.transfers import Failed, Transfer

WHOLE_TRANSFER = -1
"""Key in ``written_until`` for the transfer as a whole, where partial results do not count."""


class Fetcher:
    """One thread's work. A chunk is read while another thread unpacks the one before."""

    def __init__(self, consumer: ConsumerView) -> None:
        self._consumer = consumer
        self._connections, self._receiving = Connections(consumer), Receiving(consumer)
        self._direct = DirectReader(consumer, self._connections, self._receiving)
        self._chunks = ChunkReader(consumer, self._connections, self._receiving)
        self._pushes = PushReceiver(consumer, self._connections.clients)

    def run(self, work: Transfer | Notice | PushStop) -> None:
        if isinstance(work, Transfer):
            self._run_transfer(work)
        elif isinstance(work, PushStop):
            work.ask(self._connections.clients, self._consumer.options.answer_timeout)
        else:
            self._connections.post(work)

    def close(self) -> None:
        self._connections.close()

    def _run_transfer(self, transfer: Transfer) -> None:
        assert transfer.source is not None
        transport, block_size = self._consumer.transport.name, self._consumer.cache.block_size
        breaker, clients = self._consumer.breaker(transfer.source), self._connections.clients
        sent, began = clients.sent, monotonic()
        transfer.phases.setdefault("queue", began - transfer.started)
        if refusal := breaker.refusal():
            transfer.fail(TransferError("peer", refusal), transport, block_size)
            return
        try:
            self._fetch(transfer)
            breaker.note_success()
            transfer.messages = clients.sent - sent
            transfer.succeed()
        except Exception as error:
            # Chunks read before the error count; a second error is ignored.
            with suppress(Exception):
                self._receiving.wait()
            if isinstance(error, NotYetError) and self._consumer.try_later(transfer):
                return
            # After a TransferEndedError, fail() below has no effect.
            if not isinstance(error, TransferError):
                error = TransferError("internal", printable(f"{type(error).__name__}: {error}"))
            elif error.kind == "peer":
                breaker.note_failure(str(error), began)
            transfer.fail(error, transport, block_size)
        self._release(transfer)

    def _release(self, transfer: Transfer) -> None:
        """Tell the producer that a transfer has ended; after a failure, drop the connections."""
        source = transfer.source
        assert source is not None
        if transfer.layerwise:
            self._connections.post(Notice(source, self._consumer.finish_message(source)))
        elif isinstance(transfer.outcome, Failed):
            self._connections.post(Notice(source, self._consumer.release_message(transfer)))
        if isinstance(transfer.outcome, Failed) and transfer.outcome.kind != "aborted":
            self._connections.disconnect(source.ranks)

    def _fetch(self, transfer: Transfer) -> None:
        parts = self._plan(transfer)
        if transfer.layerwise:
            if all(self._pushes.can_push(transfer, part.plan, part.peer) for part in parts):
                self._pushes.receive(transfer, [part.plan for part in parts])
            else:
                self._chunks.read_layerwise(parts)
        else:
            transfer.written_until = dict.fromkeys(range(len(parts)), transfer.start)
            # The request fails as a whole: vLLM does not accept single invalid blocks with several
            # KV cache groups.
            if self._consumer.cache.is_hybrid:
                transfer.written_until[WHOLE_TRANSFER] = transfer.start
            for part in parts:
                if part.begin < transfer.stop and not (
                    self._direct.can_read(part) and self._direct.read(part)
                ):
                    self._chunks.read(part)
        self._receiving.wait()

    def _plan(self, transfer: Transfer) -> list[Part]:
        """The fetch from each rank of the producer."""
        peers, cache = self._connections.handshake(transfer), self._consumer.cache
        chunk = min(self._consumer.options.chunk_bytes, *(peer.chunk_bytes for peer in peers))
        plans = in_chunks(plan_fetches(cache, peers, self._consumer.rank.index), cache, chunk)
        parts = [
            Part(
                transfer,
                number,
                plan,
                peers[plan.rank],
                cache.first_needed_token(transfer.start, transfer.stop, plan.group),
            )
            for number, plan in enumerate(plans)
        ]
        transfer.total = sum(
            (transfer.stop - part.begin) * cache.token_bytes(part.plan.local, part.plan.heads.num)
            for part in parts
        )
        return parts
