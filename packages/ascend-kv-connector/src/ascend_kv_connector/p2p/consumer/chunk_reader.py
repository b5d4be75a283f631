# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Reads of the chunks that a producer packs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import msgspec
from ascend_transfer.engine import Runs
from ascend_transfer.errors import TransferError
from ascend_transfer.rpc import RpcClient

from ascend_kv_connector.p2p.consumer.connections import LANE_SECONDS, Connections, Part
from ascend_kv_connector.p2p.consumer.receiving import Receiving
from ascend_kv_connector.p2p.consumer.view import ConsumerView
from ascend_kv_connector.p2p.paged_cache import FetchPlan
from ascend_kv_connector.p2p.protocol import Chunk, Fetch, Message
from ascend_kv_connector.p2p.runs import Placement, plan_runs

MAX_LAYERWISE_POLL = 0.005
"""Longest pause in seconds between fetches of a prompt that is being computed."""


class ChunkReader:
    """Reads of one thread."""

    def __init__(
        self, consumer: ConsumerView, connections: Connections, receiving: Receiving
    ) -> None:
        self._consumer, self._connections, self._receiving = consumer, connections, receiving

    def read(self, part: Part) -> None:
        """Fetch all tokens of a part; the next chunk is requested while one is read."""
        client, transfer = self._connections.client(part), part.transfer
        each = self._tokens_per_chunk(part)
        fetches = [
            self._make_fetch(part, first, each) for first in range(part.begin, transfer.stop, each)
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
            self._read_chunk(part, fetch, chunk, until)

    def read_layerwise(self, parts: Sequence[Part]) -> None:
        """Fetch a prompt during its prefill: the tokens that are ready, layer after layer, until
        all are fetched."""
        layers = self._by_layer(parts)
        transfer = layers[0].transfer
        transfer.written_until = dict.fromkeys(range(len(layers)), transfer.start)
        at = [transfer.start] * len(layers)
        pending = deque(layers)

        def ask(part: Part) -> tuple[Fetch, RpcClient, int]:
            client = self._connections.clients.get(part.address)
            fetch = self._make_fetch(part, at[part.number], self._tokens_per_chunk(part))
            return fetch, client, client.send(fetch)

        asked = ask(pending[0])
        while pending:
            left = transfer.remaining()
            part, (fetch, client, number) = pending.popleft(), asked
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
                # The chunk was full: more tokens may be ready.
                (pending.appendleft if chunk.stop == fetch.stop else pending.append)(part)
            at[part.number] = chunk.stop
            if pending:
                asked = ask(pending[0])
            self._read_chunk(part, msgspec.structs.replace(fetch, stop=chunk.stop), chunk, until)

    def _by_layer(self, parts: Sequence[Part]) -> list[Part]:
        """A part for each layer of each rank, in the order in which the layers are computed."""
        regions = self._consumer.cache.regions
        plans: dict[tuple[int, str], tuple[FetchPlan, Part]] = {}
        for part in parts:
            for remote, local in zip(part.plan.remote, part.plan.local, strict=True):
                plan, _ = plans.setdefault(
                    (part.plan.rank, regions[local].layer),
                    (part.plan._replace(remote=[], local=[]), part),
                )
                plan.remote.append(remote)
                plan.local.append(local)
        ordered = sorted(plans.values(), key=lambda each: each[0].local)
        return [
            replace(part, number=number, plan=plan) for number, (plan, part) in enumerate(ordered)
        ]

    def _tokens_per_chunk(self, part: Part) -> int:
        chunk_bytes = min(part.peer.chunk_bytes, self._consumer.options.chunk_bytes)
        each = chunk_bytes // self._consumer.cache.token_bytes(part.plan.local, part.plan.heads.num)
        if not each:
            raise TransferError(
                "mismatch", "one token is larger than a chunk", "raise chunk_mib on both instances"
            )
        return each

    def _make_fetch(self, part: Part, first: int, each: int) -> Fetch:
        transfer, plan = part.transfer, part.plan
        return Fetch(
            request=part.source.request,
            reader=self._consumer.rank.engine,
            rank=self._consumer.rank.index,
            transfer=transfer.request,
            start=first,
            stop=min(first + each, transfer.stop),
            regions=plan.remote,
            first_head=plan.heads.first,
            heads=plan.heads.num,
            verify=self._consumer.options.verify,
            allow_partial=transfer.layerwise,
        )

    def _read_chunk(self, part: Part, fetch: Fetch, chunk: Chunk, until: float) -> None:
        """Read a chunk, into the cache if all heads are in it; otherwise it is unpacked while the
        next one is read."""
        transfer, receiving = part.transfer, self._receiving
        runs, is_direct = self._plan(part, fetch, chunk)
        buffer = None
        if is_direct:
            receiving.read_into_cache(part, runs, until)
        else:
            buffer = receiving.read_into_buffer(part, runs, until)
        try:
            # Release the peer's buffer before anything is awaited: readers that each hold one
            # peer's buffer and wait for another's would deadlock.
            self._connections.clients.get(part.address).post(
                self._consumer.release_message(transfer, chunk.ticket)
            )
            if monotonic() >= until:
                cause = (
                    f"reading a chunk took longer than the {chunk.seconds:g} s for which the peer"
                    " kept it"
                )
                raise TransferError("lease", cause)
            if buffer is None:
                transfer.count(part.number, chunk.size, fetch.stop)
                return
            crc = chunk.checksum if fetch.verify else None
            receiving.unpack_later(part, range(fetch.start, fetch.stop), buffer, chunk.size, crc)
        except Exception:
            if buffer is not None:
                receiving.release(buffer)
            raise

    def _plan(self, part: Part, fetch: Fetch, chunk: Chunk) -> tuple[Runs, bool]:
        """Runs of a chunk, and whether they go to the cache."""
        cache, regions = self._consumer.cache, part.plan.local
        expected = (fetch.stop - fetch.start) * cache.token_bytes(regions, fetch.heads)
        if chunk.size != expected:
            raise TransferError(
                "mismatch", f"the peer sent a chunk of {chunk.size} bytes instead of {expected}"
            )
        local = None if fetch.verify else self._receiving.placement(part, fetch.start, fetch.stop)
        if local:
            sizes = cache.token_sizes(regions, fetch.heads)
            packed = Placement.packed(chunk.address, fetch.stop - fetch.start, sizes)
            runs = plan_runs(packed, local, sizes)
            if len(runs.size) <= self._consumer.transport.most_runs * len(sizes):
                return runs, True
        return Runs([chunk.address], [0], [chunk.size]), False


def _expect_chunk(answer: Message) -> Chunk:
    if not isinstance(answer, Chunk):
        raise TransferError("mismatch", f"unexpected reply to Fetch: {type(answer).__name__}")
    return answer
