"""Throughput of KV cache transfers between two ranks over Mooncake, relative to Mooncake alone."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from ascend_kv_connector.config import Options
from ascend_kv_connector.runs import Runs

REQUESTS, TOKENS, LAYERS, HEADS, SIZE = 4, 1024, 16, 8, 128
LANES = 2
PIECE = Options().chunk_bytes
AIM = 0.85


class Loopback:
    """A network of Mooncake transports over loopback."""

    def make_transport(self) -> Any:
        from ascend_kv_connector.mooncake import MooncakeTransport

        return MooncakeTransport("127.0.0.1", "tcp")


def instance(name: str, device: str) -> Any:
    """One rank with a cache for all requests, 16-bit, ``[blocks, 128 tokens, 8 heads, 128]`` for a layer's keys and values."""
    import torch
    from harness.kv.instances import Instance

    made = Instance(
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
    )
    return made


def serve(pipe: Connection, device: str) -> None:
    """The producer process: prompts for each round, and a buffer for the reads by Mooncake alone."""
    import torch

    producer = instance("p", device).produce()
    transport = Loopback().make_transport()
    buffer = torch.ones(producer.options.chunk_bytes, dtype=torch.uint8)
    transport.register(buffer)
    pipe.send((transport.session, buffer.data_ptr()))
    blocks = [producer.take(TOKENS) for _ in range(REQUESTS)]
    for cache in producer.caches[0].caches:
        cache.copy_(torch.arange(cache.shape[0]).view(-1, 1, 1, 1))
    while (asked := pipe.recv()) != "stop":
        for number, held in enumerate(blocks):
            producer.producers[0].leases.grant(f"{asked}-{number}", held, TOKENS, 600.0)
        pipe.send([producer.source(f"{asked}-{number}") for number in range(REQUESTS)])
    producer.close()


def compare(rounds: int, device: str = "npu") -> list[str]:
    """Print seconds of each round and the ratio; returns what is below the aim."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, device))
    process.start()
    try:
        consumer = instance("d", device).consume()
        assert ours.poll(120)
        session, address = ours.recv()
        total = REQUESTS * TOKENS * consumer.caches[0].token_bytes(range(2 * LAYERS), HEADS)
        bare = bare_reader(session, address, total)
        blocks = [consumer.take(TOKENS) for _ in range(REQUESTS)]
        times: dict[str, list[float]] = {"connector": [], "Mooncake": []}
        for number in range(rounds + 1):  # the first connects
            ours.send(f"r{number}")
            assert ours.poll(120)
            sources = ours.recv()
            for name, run in (
                ("connector", lambda sources=sources, blocks=blocks: load(consumer, sources, blocks)),
                ("Mooncake", bare),
            ):
                began = monotonic()
                run()
                if number:
                    times[name].append(monotonic() - began)
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
    for name, each in rates.items():
        print(
            f"{name}: {' '.join(f'{rate:.2f}' for rate in each)} GB/s of {total >> 20} MiB, median {statistics.median(each):.2f}"
        )
    ratio = statistics.median(one / other for one, other in zip(*rates.values(), strict=True))  # of neighbours in time
    print(f"connector / Mooncake: {ratio:.2f} (aim {AIM})")
    return [] if ratio >= AIM else [f"throughput: {ratio:.2f} of Mooncake's, below {AIM}"]


def load(consumer: Any, sources: list[Any], blocks: list[list[int]]) -> None:
    for source, held in zip(sources, blocks, strict=True):
        consumer.consumers[0].start(source.request, source, held, 0, TOKENS)
    (ended,) = consumer.wait(len(sources), 120.0)
    assert not any(hasattr(outcome, "cause") for outcome in ended), ended


def bare_reader(session: str, address: int, total: int) -> Callable[[], None]:
    """Baseline: read as many bytes with Mooncake alone, with the connector's chunk size and number of lanes."""
    import torch

    transport = Loopback().make_transport()
    buffers = [torch.zeros(PIECE, dtype=torch.uint8) for _ in range(LANES)]
    for buffer in buffers:
        transport.register(buffer)

    def read(buffer: torch.Tensor) -> None:
        for _ in range(total // PIECE // LANES):
            transport.read(session, Runs([address], [buffer.data_ptr()], [PIECE]), 60.0)

    def run() -> None:
        threads = [threading.Thread(target=read, args=(buffer,)) for buffer in buffers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run
