# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Connections of one thread to the ranks of a producer, and what each rank's KV cache is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ascend_transfer.errors import TransferError, printable
from ascend_transfer.rpc import ClientPool, RpcClient

from ascend_kv_connector.p2p import protocol
from ascend_kv_connector.p2p.consumer.view import ConsumerView
from ascend_kv_connector.p2p.paged_cache import FetchPlan
from ascend_kv_connector.p2p.protocol import (
    CacheInfo,
    Finish,
    Handshake,
    Message,
    Query,
    Release,
    Renew,
)
from ascend_kv_connector.p2p.transfers import Source, Transfer

ReplyType = TypeVar("ReplyType", bound=Message)

LANE_SECONDS = 0.1
"""Seconds for which a transfer whose prompt is not ready keeps its thread from others; then it is
queued again."""


class Notice(NamedTuple):
    """Message for all ranks of a source, or for ``ranks`` of them."""

    source: Source
    message: Finish | Release | Renew
    ranks: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Part:
    """Part ``number`` of a transfer: what a plan takes from one rank of the producer, whose KV cache
    is ``peer``, from token ``begin`` on."""

    transfer: Transfer
    number: int
    plan: FetchPlan
    peer: CacheInfo
    begin: int

    @property
    def source(self) -> Source:
        assert self.transfer.source is not None
        return self.transfer.source

    @property
    def address(self) -> tuple[str, int]:
        return self.source.ranks[self.plan.rank]


class Connections:
    """The clients of one thread, and each rank's CacheInfo, which is requested once per
    connection."""

    def __init__(self, consumer: ConsumerView) -> None:
        self._consumer = consumer
        self._caches: dict[tuple[str, int], tuple[CacheInfo, int]] = {}
        self.clients = ClientPool(
            protocol.CODEC,
            consumer.zmq_context,
            consumer.options.answer_timeout,
            consumer.rank.keys,
            lambda address: self._caches.pop(address, None),
        )

    def client(self, part: Part) -> RpcClient:
        client = self.clients.get(part.address)
        part.transfer.peer = client.peer
        return client

    def ask(self, part: Part, query: Query, reply: type[ReplyType]) -> ReplyType:
        """The reply to a query.

        Raises:
            TransferError: there is none in time, or one of another type.
        """
        client = self.clients.get(part.address)
        transfer = part.transfer
        with transfer.phase("wait"):
            number = client.send(query)
            found = client.await_reply(
                number, query, transfer.deadline, LANE_SECONDS, check=transfer.remaining
            )
        if not isinstance(found, reply):
            what = f"unexpected reply to {type(query).__name__}: {type(found).__name__}"
            raise TransferError("mismatch", what)
        return found

    def handshake(self, transfer: Transfer) -> list[CacheInfo]:
        """CacheInfo of each of the producer's ranks."""
        assert transfer.source is not None
        with transfer.phase("connect"):
            return [self._handshake(transfer, address) for address in transfer.source.ranks]

    def post(self, notice: Notice) -> None:
        """Send a message to ranks of a producer without waiting; a rank that does not receive it
        keeps the blocks until the lease expires."""
        for address in notice.ranks or notice.source.ranks:
            try:
                self.clients.get(address).send(notice.message)
            except TransferError:
                # A client that was refused once, also by a paused peer, stays refused.
                self.clients.close(address)

    def disconnect(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Drop connections and their CacheInfo: another process may use the address next time."""
        for address in addresses:
            self.clients.close(address)

    def close(self) -> None:
        self.clients.close_idle(0.0)

    def _handshake(self, transfer: Transfer, address: tuple[str, int]) -> CacheInfo:
        assert transfer.source is not None
        transfer.remaining()
        transfer.peer = printable(f"{address[0]}:{address[1]}")
        client, engine = self.clients.get(address), transfer.source.engine
        known, connection = self._caches.get(address, (None, 0))
        if known is None or known.engine != engine or connection != client.connection_count():
            answer = client.call(Handshake(protocol.VERSION, engine), transfer.deadline)
            known = self._check(answer)
            self._caches[address] = known, client.connection_count()
        return known

    def _check(self, answer: Message) -> CacheInfo:
        """A rank's reply to Handshake.

        Raises:
            TransferError: its KV cache cannot be used here.
        """
        if not isinstance(answer, CacheInfo):
            raise TransferError(
                "mismatch", f"unexpected reply to Handshake: {type(answer).__name__}"
            )
        if len(answer.memory) not in (0, len(answer.regions)):
            raise TransferError(
                "mismatch",
                f"the peer has {len(answer.memory)} addresses for {len(answer.regions)} regions",
            )
        rank, transport = self._consumer.rank, self._consumer.transport.name
        if answer.model != rank.model or answer.transport != transport:
            raise TransferError(
                "mismatch",
                f"the peer serves {printable(answer.model)} by {printable(answer.transport)},"
                f" this instance {rank.model} by {transport}",
            )
        if answer.weights and rank.weights and answer.weights != rank.weights:
            raise TransferError(
                "mismatch",
                f"the peer's weights of {rank.model} have fingerprint"
                f" {printable(answer.weights)}, this instance's {rank.weights}",
                "the checkpoint has changed since one of them started: restart it",
            )
        return answer
