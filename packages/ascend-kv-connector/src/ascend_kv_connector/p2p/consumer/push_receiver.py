# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Reader's side of a push: the ranks of a prefill instance write a prompt into this rank's blocks
while they compute it."""

from __future__ import annotations

from time import monotonic

from ascend_transfer.errors import TransferError
from ascend_transfer.rpc import ClientPool

from ascend_kv_connector.p2p.consumer.push_stop import PushStop
from ascend_kv_connector.p2p.consumer.view import ConsumerView
from ascend_kv_connector.p2p.paged_cache import FetchPlan, Heads
from ascend_kv_connector.p2p.protocol import MAX_BLOCKS, CacheInfo, Push, Pushed, Renew
from ascend_kv_connector.p2p.transfers import Transfer


class PushReceiver:
    """Receives pushes for one consumer thread."""

    def __init__(self, consumer: ConsumerView, clients: ClientPool) -> None:
        self._consumer, self._clients = consumer, clients

    def can_push(self, transfer: Transfer, plan: FetchPlan, peer: CacheInfo) -> bool:
        consumer = self._consumer
        same = (
            plan.heads == consumer.cache.heads == Heads(peer.first_head, peer.heads)
            and not consumer.cache.is_hybrid
        )
        able = peer.accepts_push and consumer.transport.can_write and consumer.memory and same
        return bool(able) and len(transfer.blocks) <= MAX_BLOCKS and consumer.may_write_directly()

    def receive(self, transfer: Transfer, plans: list[FetchPlan]) -> None:
        """Let the ranks write a prompt into this one's blocks during its prefill, until they have
        written all."""
        consumer, source, cache = self._consumer, transfer.source, self._consumer.cache
        assert source is not None
        transfer.written_until = dict.fromkeys(range(len(plans)), transfer.start)
        clients = [self._clients.get(source.ranks[plan.rank]) for plan in plans]
        renewal, renewed = Renew(source.request, consumer.rank.engine), monotonic()

        def check() -> None:
            nonlocal renewed
            transfer.remaining()
            if monotonic() - renewed > consumer.options.answer_timeout / 3:
                renewed = monotonic()
                for client in clients:
                    client.post(renewal)

        transfer.wait_until_writable(consumer.rank.stream_context)
        with transfer.reading():
            try:
                queries = [self._make_push(transfer, plan) for plan in plans]
                numbers = [
                    client.send(query) for client, query in zip(clients, queries, strict=True)
                ]
                for part, (client, query, number) in enumerate(
                    zip(clients, queries, numbers, strict=True)
                ):
                    transfer.peer = client.peer
                    with transfer.phase("wait"):
                        reply = client.await_reply(number, query, transfer.deadline, check=check)
                    size = (transfer.stop - transfer.start) * cache.token_bytes(
                        plans[part].local, plans[part].heads.num
                    )
                    if not isinstance(reply, Pushed) or reply.size != size:
                        raise TransferError("mismatch", f"unexpected reply to Push: {reply}")
                    transfer.count(part, size, transfer.stop)
            except Exception as error:
                ranks = [source.ranks[plan.rank] for plan in plans]
                stop = PushStop(
                    source, consumer.release_message(transfer), ranks, consumer.ask_again
                )
                stop.ask(self._clients, consumer.options.answer_timeout)
                error.settled = stop.settled
                raise

    def _make_push(self, transfer: Transfer, plan: FetchPlan) -> Push:
        assert transfer.source is not None
        consumer = self._consumer
        return Push(
            request=transfer.source.request,
            reader=consumer.rank.engine,
            rank=consumer.rank.index,
            transfer=transfer.request,
            start=transfer.start,
            stop=transfer.stop,
            regions=plan.remote,
            session=consumer.transport.session,
            memory=[consumer.memory[index] for index in plan.local],
            block_tokens=consumer.cache.block_tokens,
            block_size=consumer.cache.block_size,
            blocks=transfer.blocks,
        )
