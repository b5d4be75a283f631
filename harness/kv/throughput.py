# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Throughput of KV cache transfers between two ranks over Mooncake, relative to bare Mooncake."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from ascend_kv_connector.config import Options
from ascend_transfer.engine import Runs

REQUESTS, TOKENS, LAYERS, HEADS, SIZE = 4, 1024, 16, 8, 128
LANES = 2
PIECE = Options().chunk_bytes
AIM = 0.9
"""Of bare Mooncake's throughput, which reads should reach."""

MOONCAKE, ASLEEP, FLOOR = "Mooncake", "Mooncake, waited for asleep", "relative to both copies only"
"""Reads of as many bytes by Mooncake's synchronous call, by the engine of ascend_transfer,
and by the latter while both processes copy as many bytes between cache and buffer, without waiting
for each other: what staged reads could reach at best."""

WAYS = {"direct": True, "staged": False}
"""Option ``expose_cache`` by way of reading."""


class Loopback:
    """A network of Mooncake transports over loopback."""

    def make_transport(self) -> Any:
        from ascend_transfer.mooncake import MooncakeEngine

        return MooncakeEngine("127.0.0.1", "tcp")


def instance(name: str, device: str, exposed: bool) -> Any:
    """One rank with a cache for all requests, 16-bit, ``[blocks, 128 tokens, 8 heads, 128]`` for a
    layer's keys and values."""
    import torch
    from harness.kv.instances import Instance

    new_instance = Instance(
        Loopback(),
        name,
        block_size=128,
        blocks=REQUESTS * TOKENS // 128,
        layers=LAYERS,
        total_heads=HEADS,
        dtype=torch.int16,
        device=device,
        sizes={"key": SIZE, "value": SIZE},
        chunk_bytes=PIECE,
        transfer_timeout=120.0,
        answer_timeout=10.0,
        lease=600.0,
        lanes=LANES,
        expose_cache=exposed,
    )
    return new_instance


def serve(pipe: Connection, device: str) -> None:
    """The producer process: prompts for each round, and a buffer for the reads by bare Mooncake."""
    import torch

    producers = {way: instance(way, device, exposed).produce() for way, exposed in WAYS.items()}
    transport = Loopback().make_transport()
    buffer = torch.ones(PIECE, dtype=torch.uint8)
    transport.register(buffer)
    pipe.send((transport.session, buffer.data_ptr()))
    blocks = {
        way: [producer.take(TOKENS) for _ in range(REQUESTS)] for way, producer in producers.items()
    }
    for producer in producers.values():
        for cache in producer.caches[0].caches:
            cache.copy_(torch.arange(cache.shape[0]).view(-1, 1, 1, 1))
    while (asked := pipe.recv()) != "stop":
        if asked == "processor":
            pipe.send(processor_seconds())
            continue
        if asked == "copy":
            copy_cache(producers["staged"], into_buffer=True)
            pipe.send("copied")
            continue
        sources = {}
        for way, producer in producers.items():
            for number, held in enumerate(blocks[way]):
                producer.producers[0].leases.grant(f"{asked}-{number}", held, TOKENS, 600.0)
            sources[way] = [producer.source(f"{asked}-{number}") for number in range(REQUESTS)]
        pipe.send(sources)
    for producer in producers.values():
        producer.close()


def processor_seconds() -> float:
    """Used by this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def copy_cache(held: Any, into_buffer: bool) -> None:
    """Copy a whole cache to or from one of the rank's staging buffers, a tensor at a time."""
    rank = (held.producers or held.consumers)[0]
    buffer = rank._buffers.buffers[0] if into_buffer else rank.buffers.acquire()
    with held.queue():
        for cache in held.caches[0].caches:
            part = buffer[: cache.nbytes].view(cache.dtype).view(cache.shape)
            (
                part.copy_(cache, non_blocking=True)
                if into_buffer
                else cache.copy_(part, non_blocking=True)
            )
    if not into_buffer:
        rank.buffers.release(buffer)


def compare(rounds: int, device: str = "cpu") -> list[str]:
    """Print seconds of each round and the ratios; returns what is below the aim.

    The KV caches are in host memory, as those of protocol ``ascend`` are in the NPU's: the
    transport can access them. With ``device`` npu both ways are staged, since protocol ``tcp``
    cannot.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, device))
    process.start()
    try:
        consumers = {
            way: instance(f"d-{way}", device, exposed).consume() for way, exposed in WAYS.items()
        }
        assert ours.poll(240)
        session, address = ours.recv()
        total = (
            REQUESTS * TOKENS * consumers["direct"].caches[0].token_bytes(range(2 * LAYERS), HEADS)
        )
        synchronous, asleep = bare_readers(session, address, total)
        blocks = {
            way: [consumer.take(TOKENS) for _ in range(REQUESTS)]
            for way, consumer in consumers.items()
        }
        counts: dict[str, str] = {}

        def ask(what: str) -> Any:
            ours.send(what)
            assert ours.poll(120)
            return ours.recv()

        def beside_copies() -> None:
            ours.send("copy")
            copying = threading.Thread(target=copy_cache, args=(consumers["staged"], False))
            copying.start()
            asleep()
            copying.join()
            assert ours.poll(120)
            ours.recv()

        def reader(way: str) -> Callable[[], None]:
            def run() -> None:
                counts[way] = load(consumers[way], sources[way], blocks[way])

            return run

        readers = {MOONCAKE: synchronous, ASLEEP: asleep, FLOOR: beside_copies} | {
            way: reader(way) for way in WAYS
        }
        times: dict[str, list[float]] = {name: [] for name in readers}
        used: dict[str, list[float]] = {name: [] for name in readers}
        for number in range(rounds + 1):  # the first connects
            sources = ask(f"r{number}")
            for name, read in readers.items():
                before = processor_seconds() + ask("processor")
                began = monotonic()
                read()
                seconds = monotonic() - began
                if number:
                    times[name].append(seconds)
                    used[name].append(processor_seconds() + ask("processor") - before)
        for consumer in consumers.values():
            for cache in consumer.caches[0].caches:  # the producer's pages in another order
                held = cache.cpu().reshape(REQUESTS * TOKENS // 128, -1)
                assert held[:, 0].unique().numel() == held.shape[0]
            consumer.close()
    finally:
        ours.send("stop")
        process.join(10)
        if process.is_alive():
            process.kill()
    rates = {name: [total / seconds / 1e9 for seconds in each] for name, each in times.items()}
    print(f"{total >> 20} MiB of {REQUESTS} prompts, KV cache on {device}, {rounds} rounds\n")
    print(
        "| | GB/s: median | least | most | of Mooncake's (median of pairs) | of Mooncake's, waited"
        " for asleep | processor seconds a GB, both processes | copies per byte here, messages per"
        " prompt |\n" + "|---" * 8 + "|"
    )
    ratios = {}
    for name, each in rates.items():
        of = [
            statistics.median(one / other for one, other in zip(each, rates[bare], strict=True))
            for bare in (MOONCAKE, ASLEEP)
        ]
        ratios[name] = of[0]
        seconds = statistics.median(used[name]) / total * 1e9
        figures = [statistics.median(each), min(each), max(each), *of, seconds]
        print(
            f"| {name} | {' | '.join(f'{figure:.2f}' for figure in figures)} |"
            f" {counts.get(name, '')} |",
            flush=True,
        )
    return [
        f"throughput: {way} {ratios[way]:.2f} of Mooncake's, below {AIM}"
        for way in WAYS
        if ratios[way] < AIM
    ]


def load(consumer: Any, sources: list[Any], blocks: list[list[int]]) -> str:
    """Load all prompts; copies per byte, and messages per prompt."""
    for source, held in zip(sources, blocks, strict=True):
        consumer.consumers[0].start(source.request, source, held, 0, TOKENS)
    (ended,) = consumer.wait(len(sources), 120.0)
    assert not any(hasattr(outcome, "cause") for outcome in ended), ended
    size, messages = (
        sum(outcome.size for outcome in ended),
        sum(outcome.messages for outcome in ended),
    )
    return f"{sum(outcome.copied for outcome in ended) / size:.0f}, {messages / len(ended):.1f}"


def bare_readers(
    session: str, address: int, total: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Baselines: read as many bytes with bare Mooncake, with the connector's chunk size and number
    of lanes.

    The first by Mooncake's synchronous call, which other connectors use; the second by our engine.
    """
    import torch
    from ascend_transfer.engine import READ_SECONDS
    from ascend_transfer.mooncake import shared_engine

    transport, shared = Loopback().make_transport(), shared_engine("127.0.0.1", "tcp", READ_SECONDS)
    engine, peer = shared.engine, shared.peer_name(session)
    buffers = [torch.zeros(PIECE, dtype=torch.uint8) for _ in range(LANES)]
    for buffer in buffers:
        transport.register(buffer)

    def synchronous(to: int) -> None:
        assert engine.batch_transfer_sync_read(peer, [to], [address], [PIECE]) == 0

    def asleep(to: int) -> None:
        transport.read(session, Runs([address], [to], [PIECE]), 60.0)

    def reader(read: Callable[[int], None]) -> Callable[[], None]:
        def lane(buffer: torch.Tensor) -> None:
            for _ in range(total // PIECE // LANES):
                read(buffer.data_ptr())

        def run() -> None:
            threads = [threading.Thread(target=lane, args=(buffer,)) for buffer in buffers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return run

    return reader(synchronous), reader(asleep)
