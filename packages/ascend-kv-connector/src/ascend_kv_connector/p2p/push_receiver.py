# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Reader's side of a push: the ranks of a prefill instance write a prompt into this rank's blocks
while they compute it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Protocol

from ascend_platform.transfer.engine import Engine
from ascend_platform.transfer.errors import TransferError
from ascend_platform.transfer.rpc import ClientPool

from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p.paged_cache import FetchPlan, Heads, PagedCache
from ascend_kv_connector.p2p.protocol import (
    MAX_BLOCKS,
    VERSION,
    CacheInfo,
    Handshake,
    Push,
    Pushed,
    Refused,
    Release,
    Renew,
)
from ascend_kv_connector.p2p.transfers import Source, Transfer

LINGER_SECONDS = 120.0
"""Seconds for which bytes may arrive after their sender has closed the connection, or has died:
Linux gives up such a connection after 8 retransmissions, 102 s (``tcp_orphan_retries`` in
``Documentation/networking/ip-sysctl.rst``)."""

RETRY_SECONDS = 1.0, 30.0
"""First and longest pause between queries to ranks that have not confirmed that they write no more.
"""


class Rank(Protocol):
    """What a receiver uses of :class:`~ascend_kv_connector.p2p.consumer.Consumer`."""

    cache: PagedCache
    memory: list[tuple[int, int]]
    transport: Engine
    options: Options
    rank: int
    reader: str
    stream_context: Callable[..., AbstractContextManager]

    def release_message(self, transfer: Transfer, *tickets: int) -> Release: ...

    def ask_again(self, stop: PushStop) -> None: ...

    def may_write_directly(self) -> bool: ...


class PushStop:
    """The end of a transfer at the ranks that write it. Those in ``left`` have not confirmed that
    they write no more."""

    def __init__(
        self,
        source: Source,
        message: Release,
        ranks: Iterable[tuple[str, int]],
        ask_again: Callable[[PushStop], None],
    ) -> None:
        """``ask_again(stop)`` calls :meth:`ask` in a thread."""
        self.source, self.left = source, list(dict.fromkeys(ranks))
        self._message, self._ask_again = message, ask_again
        self._lock = threading.RLock()  # ask_again may call ended
        self._asking, self._attempts, self._due = True, 0, 0.0
        self._linger, self._last = 0.0, 0.0

    def settled(self) -> bool:
        """Whether no more data can arrive; the remaining ranks are queried again from time to
        time."""
        with self._lock:
            now = monotonic()
            if self.left:
                if not self._asking and now >= self._due:
                    self._asking = True
                    self._ask_again(self)
                return False
            # A pause of this process does not count: what had arrived is read after it.
            self._linger -= min(now - self._last, 1.0)
            self._last = now
            return self._linger <= 0

    def ask(self, clients: ClientPool, seconds: float) -> None:
        """Ask the ranks that are left, for this long."""
        until = monotonic() + seconds
        for address in list(self.left):
            try:
                lingers = self._has_ended(clients, address, until)
            except TransferError:
                # A client that was refused once, also by a paused peer, stays refused.
                clients.close(address)
                continue
            with self._lock:
                self.left.remove(address)
                if lingers:
                    self._linger = LINGER_SECONDS
        self.ended()

    def ended(self) -> None:
        """An attempt has ended."""
        first, longest = RETRY_SECONDS
        with self._lock:
            self._due = monotonic() + min(longest, first * 2 ** min(self._attempts, 9))
            self._attempts += 1
            self._asking, self._last = False, monotonic()

    def _has_ended(self, clients: ClientPool, address: tuple[str, int], until: float) -> bool:
        """Ask a rank, which writes no more on return; whether bytes that it has sent may still
        arrive.

        Raises:
            TransferError: it has not confirmed it.
        """
        try:
            client = clients.get(address)
            reply = client.receive(client.send(Handshake(VERSION, self.source.engine)), until)
            if isinstance(reply, Refused) and reply.kind in ("peer", "mismatch"):
                return True  # another process has the address
            client.call(self._message, until)
        except TransferError as error:
            if error.kind != "transport" and not _refuses_connections(address):
                raise
            return True  # A write has failed, or the process has ended.
        return self._attempts > 0


def _refuses_connections(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


class PushReceiver:
    """Receives pushes for one consumer thread."""

    def __init__(self, consumer: Rank, clients: ClientPool) -> None:
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
        renewal, renewed = Renew(source.request, consumer.reader), monotonic()

        def check() -> None:
            nonlocal renewed
            transfer.remaining()
            if monotonic() - renewed > consumer.options.answer_timeout / 3:
                renewed = monotonic()
                for client in clients:
                    client.post(renewal)

        transfer.wait_until_writable(consumer.stream_context)
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
