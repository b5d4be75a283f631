"""Reader's side of a push: the ranks of a prefill instance write a prompt into this rank's blocks while they compute it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Protocol

from ascend_platform.transfer.engine import Engine
from ascend_platform.transfer.errors import TransferError
from ascend_platform.transfer.rpc import ClientPool, RpcClient

from ascend_kv_connector.config import Options
from ascend_kv_connector.paged_cache import FetchPlan, Heads, PagedCache
from ascend_kv_connector.protocol import CacheInfo, Push, Pushed, Release, Renew
from ascend_kv_connector.transfers import Transfer


class Rank(Protocol):
    """What a receiver uses of :class:`~ascend_kv_connector.consumer.Consumer`."""

    cache: PagedCache
    memory: list[tuple[int, int]]
    transport: Engine
    options: Options
    rank: int
    reader: str
    stream_context: Callable[..., AbstractContextManager]

    def release_message(self, transfer: Transfer, *tickets: int) -> Release: ...


class PushReceiver:
    """Has the connections of one thread of the consumer."""

    def __init__(self, consumer: Rank, clients: ClientPool) -> None:
        self._consumer, self._clients = consumer, clients

    def can_push(self, plan: FetchPlan, peer: CacheInfo) -> bool:
        consumer = self._consumer
        same = plan.heads == consumer.cache.heads == Heads(peer.first_head, peer.heads) and not consumer.cache.is_hybrid
        return bool(peer.accepts_push and consumer.memory and same)

    def receive(self, transfer: Transfer, plans: list[FetchPlan]) -> None:
        """Let the ranks write a prompt into this one's blocks during its prefill, until they have written all."""
        consumer, source, cache = self._consumer, transfer.source, self._consumer.cache
        assert source is not None
        transfer.written_until = dict.fromkeys(range(len(plans)), transfer.start)
        clients = [self._clients.get(source.ranks[plan.rank]) for plan in plans]
        renewal, renewed = Renew(source.request, consumer.reader), monotonic()

        def check() -> None:
            nonlocal renewed
            transfer.remaining()
            if monotonic() - renewed > consumer.options.answer_timeout / 3:
                renewed = monotonic()
                for client in clients:
                    client.post(renewal)

        with transfer.reading():
            transfer.wait_until_writable(consumer.stream_context)
            try:
                queries = [self._make_push(transfer, plan) for plan in plans]
                numbers = [client.send(query) for client, query in zip(clients, queries, strict=True)]
                for part, (client, query, number) in enumerate(zip(clients, queries, numbers, strict=True)):
                    transfer.peer = client.peer
                    with transfer.phase("wait"):
                        reply = client.await_reply(number, query, transfer.deadline, check=check)
                    size = (transfer.stop - transfer.start) * cache.token_bytes(plans[part].local, plans[part].heads.num)
                    if not isinstance(reply, Pushed) or reply.size != size:
                        raise TransferError("mismatch", f"unexpected reply to Push: {reply}")
                    transfer.count(part, size, transfer.stop)
            except Exception as error:
                if self._stop_pushes(transfer, clients):
                    error.quarantine = 0.0
                raise

    def _make_push(self, transfer: Transfer, plan: FetchPlan) -> Push:
        assert transfer.source is not None
        consumer = self._consumer
        return Push(
            request=transfer.source.request,
            reader=consumer.reader,
            rank=consumer.rank,
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

    def _stop_pushes(self, transfer: Transfer, clients: list[RpcClient]) -> bool:
        """Tell the ranks not to write any more; whether all have confirmed it."""
        message, until = self._consumer.release_message(transfer), monotonic() + self._consumer.options.answer_timeout
        try:
            for client in clients:
                client.call(message, until)
        except TransferError:
            return False
        return True
