# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Prefill and decode instances with synthetic KV caches, connected without an engine."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from time import monotonic, sleep
from typing import Any, Protocol

import torch
from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p.consumer.consumer import Consumer
from ascend_kv_connector.p2p.paged_cache import (
    Heads,
    PagedCache,
    group_block_table,
    kv_heads_of_rank,
)
from ascend_kv_connector.p2p.producer.producer import Producer
from ascend_kv_connector.p2p.rank import RankContext, private_stream
from ascend_kv_connector.p2p.transfers import Done, Failed, Source
from ascend_transfer.auth import CurveKeys

TOTAL_HEADS, SIZES = 4, {"key": 6, "value": 4}


def values(request: str, layer: int, part: str, tokens: range, heads: Heads) -> torch.Tensor:
    """Cache contents of a request, ``[tokens, heads]``, distinct for each layer, part, token and
    head."""
    seed = zlib.crc32(f"{request} {layer} {part}".encode()) % 32749
    token, head = torch.tensor(tokens)[:, None], torch.arange(heads.first, sum(heads))
    return (seed + 131 * token + 7919 * head) % 32749 + 1


class Network(Protocol):
    """Factory of each rank's transport."""

    def make_transport(self) -> Any: ...


class ScheduledConsumer(Consumer):
    """A consumer that releases a source after the last load from it, as P2PScheduler lets the
    workers do."""

    def start(
        self,
        request: str,
        source: Source | None,
        blocks: list[int],
        start: int,
        stop: int,
        after: Any = None,
    ) -> None:
        self.__dict__.setdefault("sources", {})[request] = source
        super().start(request, source, blocks, start, stop, after)

    def get_finished(self) -> list[Done | Failed]:
        ended = super().get_finished()
        for outcome in ended:
            source = self.__dict__["sources"].pop(outcome.request)
            if source is not None and source not in self.__dict__["sources"].values():
                self.release(source)
        return ended


class Instance:
    """The ranks of one instance: caches ``[blocks, block_size, heads, size]`` of int16, for each
    rank its layers and heads.

    With several windows (0: none) the layers are of these groups by turns, and a request's tables
    one behind the other.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        tp: int = 1,
        pp: int = 1,
        block_size: int = 4,
        blocks: int = 64,
        layers: int = 2,
        total_heads: int = TOTAL_HEADS,
        dtype: torch.dtype = torch.int16,
        device: str = "cpu",
        sizes: dict[str, int] | None = None,
        cut: int = 1,
        keys: CurveKeys | None = None,
        weights: str = "",
        windows: tuple[int, ...] = (0,),
        **options: object,
    ) -> None:
        self.name, self.block_size, self.total_heads, self.layers, self.windows = (
            name,
            block_size,
            total_heads,
            layers,
            windows,
        )
        given = {"transfer_timeout": 5.0, "answer_timeout": 2.0, "lease": 5.0} | options
        chunk_bytes = given.pop("chunk_bytes", 512)
        self.options = type("SmallOptions", (Options,), {"chunk_bytes": chunk_bytes})(**given)
        self.network, self.keys, self.weights = network, keys, weights
        self.caches: list[PagedCache] = []
        self.free = list(range(int(windows != (0,)), blocks))
        random.Random(name).shuffle(self.free)
        for stage in range(pp):
            for rank in range(tp):
                heads = kv_heads_of_rank(rank, tp, total_heads)
                stage_layers = range(stage * layers // pp, (stage + 1) * layers // pp)
                regions = [
                    (
                        f"layers.{layer}",
                        part,
                        torch.full((blocks * cut, block_size // cut, heads.num, size), -1).to(
                            device, dtype
                        ),
                    )
                    for layer in stage_layers
                    for part, size in (sizes or SIZES).items()
                ]
                groups = {f"layers.{layer}": layer % len(windows) for layer in stage_layers}
                self.caches.append(
                    PagedCache(regions, block_size, heads, total_heads, groups, windows)
                )
        self.queue = (
            nullcontext if device == "cpu" else partial(private_stream, torch.device(device, 0))
        )
        self.producers: list[Producer] = []
        self.consumers: list[Consumer] = []

    def produce(self, model: str = "m", port: int = 0) -> Instance:
        self.producers = [
            Producer(rank, cache, self.network.make_transport(), self.options, port)
            for rank, cache in self._ranks(model)
        ]
        self.freed: list[set[str]] = [set() for _ in self.producers]
        return self

    def consume(self, model: str = "m") -> Instance:
        self.consumers = [
            ScheduledConsumer(rank, cache, self.network.make_transport(), self.options)
            for rank, cache in self._ranks(model)
        ]
        return self

    def _ranks(self, model: str) -> Iterator[tuple[RankContext, PagedCache]]:
        for index, cache in enumerate(self.caches):
            yield (
                RankContext(
                    self.name,
                    model,
                    index,
                    len(self.caches),
                    self.weights,
                    keys=self.keys,
                    stream_context=self.queue,
                ),
                cache,
            )

    def take(self, tokens: int) -> list[int]:
        """Allocate blocks for `tokens` in each group; none for tokens that are outside a sliding
        window."""
        count, block_ids = -(-tokens // self.block_size), []
        for group in range(len(self.windows)):
            gone = self.caches[0].first_needed_token(0, tokens, group) // self.block_size
            block_ids += [0] * gone + self.free[: count - gone]
            self.free = self.free[count - gone :]
        return block_ids

    def places(
        self, request: str, blocks: list[int], start: int, stop: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each region all rows, those of the tokens, and what belongs there; ``blocks`` begin
        with token ``start``."""
        device = self.caches[0].device
        for cache in self.caches:
            for region, group, tensor in zip(
                cache.regions, cache.region_groups, cache.caches, strict=True
            ):
                first = cache.first_needed_token(start, stop, group)
                table = torch.tensor(
                    group_block_table(blocks, group, len(self.windows)), dtype=torch.int64
                )
                tokens = torch.arange(first - start, stop - start)
                rows = table[tokens // self.block_size] * self.block_size + tokens % self.block_size
                layer = int(region.layer.split(".")[1])
                expected = values(request, layer, region.part, range(first, stop), cache.heads)
                rows_of_heads = expected[:, :, None].expand(-1, -1, region.size)
                yield tensor.flatten(0, 1), rows.to(device), rows_of_heads.to(device, tensor.dtype)

    def fill(
        self, request: str, tokens: int, seconds: float | None = None
    ) -> tuple[Source, list[int]]:
        """Compute a prompt and keep its blocks for readers."""
        blocks = self.take(tokens)
        for cache, rows, expected in self.places(request, blocks, 0, tokens):
            cache[rows] = expected
        written = self.mark()
        for producer in self.producers:
            producer.leases.grant(
                request, blocks, tokens, self.options.lease if seconds is None else seconds, written
            )
        return self.source(request), blocks

    def mark(self) -> Callable[[], bool]:
        """An event query: whether the work enqueued so far has finished."""
        if self.caches[0].device.type == "cpu":
            return lambda: True
        event = torch.npu.Event()
        event.record()
        return event.query

    def source(self, request: str) -> Source:
        ranks = tuple((producer.server.host, producer.server.port) for producer in self.producers)
        return Source(self.name, request, ranks)

    def holds(self, request: str, blocks: list[int], start: int, stop: int) -> bool:
        return all(
            torch.equal(cache[rows], expected)
            for cache, rows, expected in self.places(request, blocks, start, stop)
        )

    def wait(self, requests: int = 1, seconds: float = 20.0) -> list[list[Done | Failed]]:
        """Wait for the outcome of `count` requests on each rank."""
        ended: list[list[Done | Failed]] = [[] for _ in self.consumers]
        until = monotonic() + seconds
        while any(len(each) < requests for each in ended):
            assert monotonic() < until, f"still open after {seconds} s: {ended}"
            for rank, consumer in enumerate(self.consumers):
                ended[rank] += consumer.get_finished()
            sleep(0.002)
        return ended

    def all_free(self, request: str, seconds: float = 5.0) -> bool:
        """Whether all ranks of the producer report the request's blocks as free, in time."""
        until = monotonic() + seconds
        while not all(request in freed for freed in self.freed) and monotonic() < until:
            for freed, producer in zip(self.freed, self.producers, strict=True):
                freed.update(producer.leases.pop_ended())
            sleep(0.002)
        return all(request in freed for freed in self.freed)

    def close(self) -> None:
        """Close, with the transports: a Mooncake transport left to the garbage collector blocks a
        later test for a second."""
        parts = [*self.consumers, *self.producers]
        for part in parts:
            part.close()
        for part in parts:
            part.transport.close()
