# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transfers between instances of different parallel layouts, and their failures."""

from collections.abc import Callable
from time import monotonic, sleep

import pytest
import torch
from ascend_kv_connector.p2p.paged_cache import Heads, plan_fetches
from ascend_kv_connector.p2p.protocol import VERSION, Handshake
from ascend_kv_connector.p2p.transfers import Done
from ascend_kv_connector.p2p.worker import P2PWorker
from ascend_transfer.memory import allocate_buffer
from harness.kv.memory_transport import InMemoryNetwork

LATENT = {"sizes": {"latent": 512, "rope": 64}, "total_heads": 1, "chunk_bytes": 9000}
"""Multi-head latent attention: all tensor-parallel ranks have the same cache."""

INDEXED = LATENT | {"sizes": {"latent": 512, "rope": 64, "index": 128}}
"""Sparse latent attention, whose indexer has keys of its own."""

SHAPES = {
    "same": ({}, {}),
    "tp 1 to 2": ({}, {"tp": 2}),
    "tp 2 to 1": ({"tp": 2}, {}),
    "tp 4 to 2": ({"tp": 4}, {"tp": 2}),
    "tp 8 to 1, heads on two ranks each": ({"tp": 8}, {}),
    "tp 2 to 8, heads on two ranks each": ({"tp": 2}, {"tp": 8}),
    "pp 2 to 1": ({"pp": 2}, {}),
    "pp 2 tp 2 to tp 4": ({"pp": 2, "tp": 2}, {"tp": 4}),
    "one head": ({"tp": 2, "total_heads": 1}, {"total_heads": 1}),
    "other block size": ({"block_size": 8}, {"block_size": 2, "blocks": 128}),
    "blocks cut for the kernel": ({"cut": 2}, {"cut": 4}),
    "other chunk size": ({"chunk_bytes": 4096}, {"chunk_bytes": 200}),
    "checksums": ({}, {"verify": True}),
    "windows": ({"windows": (0, 6)}, {"windows": (0, 6)}),
    "only a window, tp 2 to 1": ({"windows": (6,), "tp": 2}, {"windows": (6,)}),
    "three groups, pp 2 to tp 2": (
        {"windows": (5, 0, 1), "layers": 6, "pp": 2},
        {"windows": (5, 0, 1), "layers": 6, "tp": 2},
    ),
    "windows that the producer keeps whole": ({}, {"windows": (0, 6)}),
    "latents": (LATENT, LATENT),
    "latents, tp 4 to 2": (LATENT | {"tp": 4}, LATENT | {"tp": 2}),
    "latents, tp 1 to 4, other block size": (LATENT | {"block_size": 8}, LATENT | {"tp": 4}),
    "latents, pp 2 tp 2 to 1": (LATENT | {"pp": 2, "tp": 2}, LATENT),
    "latents on the NPU": (
        LATENT | {"device": "npu", "dtype": torch.bfloat16, "tp": 2},
        LATENT | {"device": "npu", "dtype": torch.bfloat16},
    ),
    "latents and index, tp 2 to 1": (INDEXED | {"tp": 2}, INDEXED),
    "latents and index, tp 1 to 2, other block size": (
        INDEXED | {"block_size": 8},
        INDEXED | {"tp": 2},
    ),
    "on the NPU": ({"device": "npu"}, {"device": "npu"}),
    "on the NPU, tp 2 to 1": (
        {"device": "npu", "tp": 2, "dtype": torch.bfloat16},
        {"device": "npu", "dtype": torch.bfloat16},
    ),
    "on the NPU, tp 1 to 2": (
        {"device": "npu", "dtype": torch.bfloat16},
        {"device": "npu", "tp": 2, "dtype": torch.bfloat16},
    ),
}


@pytest.mark.parametrize("exposed", [True, False], ids=["direct", "staged"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_transferred_and_blocks_are_freed(
    shape: str, exposed: bool, instances: Callable
) -> None:
    one, other = SHAPES[shape]
    producer, consumer = (
        instances("p", **one, expose_cache=exposed).produce(),
        instances("d", **other, expose_cache=exposed).consume(),
    )
    wanted = {}
    for number, tokens in enumerate((1, 4, 17, 30)):
        name = f"r{number}"
        source, _ = producer.fill(name, tokens)
        start = tokens // 2 // consumer.block_size * consumer.block_size  # a locally cached prefix
        blocks = consumer.take(tokens - start)
        wanted[name] = (blocks, start, tokens)
        for rank in consumer.consumers:
            rank.start(name, source, blocks, start, tokens)
    ended = consumer.wait(len(wanted))
    assert all(isinstance(outcome, Done) for rank in ended for outcome in rank), ended
    for name, (blocks, start, stop) in wanted.items():
        assert consumer.holds(name, blocks, start, stop)
        assert producer.all_free(name)
    untouched = set(range(64)) - {block for blocks, _, _ in wanted.values() for block in blocks}
    if consumer.windows != (0,):
        untouched.add(0)  # the null block
    caches = [
        cache.view(-1, consumer.block_size, *cache.shape[2:])
        for rank in consumer.caches
        for cache in rank.caches
    ]
    assert all(bool((cache[list(untouched)] == -1).all()) for cache in caches)
    assert sum(rank.buffers_in_use for rank in producer.producers) == 0


def test_latents_are_read_from_different_ranks(instances: Callable) -> None:
    """Of the ranks that all have them each reader's rank chooses another one."""
    producer, consumer = (
        instances("p", **LATENT, tp=4).produce(),
        instances("d", **LATENT, tp=2).consume(),
    )
    infos = [rank.answer(Handshake(VERSION, "p")) for rank in producer.producers]
    plans = [plan_fetches(cache, infos, rank) for rank, cache in enumerate(consumer.caches)]
    assert [[(plan.rank, plan.heads) for plan in each] for each in plans] == [
        [(0, Heads(0, 1))],
        [(1, Heads(0, 1))],
    ]


def test_sleep_ends_leases_and_transfers(instances: Callable, network: InMemoryNetwork) -> None:
    producer, consumer = (
        instances("p", expose_cache=False).produce(),
        instances("d", expose_cache=False).consume(),
    )
    network.faults.delay, network.faults.seconds = 1.0, 0.5
    source, _ = producer.fill("r", 30)
    for part in (consumer, producer):
        worker = P2PWorker(None, [], part.options)
        worker._producer = part.producers[0] if part.producers else None
        worker._consumer = part.consumers[0] if part.consumers else None
        blocks = part.take(30) if part is consumer else []
        if part is consumer:
            part.consumers[0].start("r", source, blocks, 0, 30)
        else:
            source, _ = producer.fill("s", 30)
        worker.set_awake(False)
        for cache in part.caches[0].caches:
            cache.fill_(-3)  # it is freed
        if part is consumer:
            ((outcome,),) = consumer.wait()
            assert (outcome.kind, outcome.cause) == (
                "sleep",
                "the instance went to sleep: this one",
            )
            assert outcome.blocks == tuple(blocks)
            sleep(1.5)  # the read returns
            assert all(bool((cache == -3).all()) for cache in part.caches[0].caches)
        else:
            assert "s" in part.producers[0].leases.pop_ended()
            consumer.consumers[0].start("s", source, consumer.take(30), 0, 30)
            ((outcome,),) = consumer.wait()
            assert (outcome.kind, outcome.cause[-32:]) == (
                "lease",
                "the one that computed the prompt",
            )
            worker.set_awake(True)
            network.faults.delay = 0.0
            source, _ = producer.fill("t", 17)
            block_ids = consumer.take(17)
            consumer.consumers[0].start("t", source, block_ids, 0, 17)
            assert isinstance(consumer.wait()[0][0], Done)
            assert consumer.holds("t", block_ids, 0, 17)


def test_buffers_are_not_in_the_pool_of_the_kv_cache() -> None:
    """It is freed in sleep mode, but a transport goes on reading what was registered with it."""
    transport = InMemoryNetwork().make_transport()
    transport.on_device = True
    pool = torch.npu.MemPool()
    with torch.npu.use_mem_pool(pool):
        cache = torch.empty(1 << 20, device="npu")
        buffer = allocate_buffer(transport, 1 << 20, torch.device("npu", 0))
    segments = [
        range(each["address"], each["address"] + each["total_size"]) for each in pool.snapshot()
    ]
    assert any(cache.data_ptr() in segment for segment in segments)
    assert not any(buffer.data_ptr() in segment for segment in segments)


def test_lease_is_kept_while_a_request_waits(instances: Callable) -> None:
    producer, consumer = instances("p", tp=4).produce(), instances("d", tp=2).consume()
    source, _ = producer.fill("r", 8, seconds=3.0)
    until = monotonic() + 4.0
    while monotonic() < until:
        for rank in consumer.consumers:
            rank.renew(source)
        sleep(0.1)
    blocks = consumer.take(8)
    assert not any(rank.leases.pop_ended() for rank in producer.producers)
    for rank in consumer.consumers:
        rank.start("r", source, blocks, 0, 8)
    assert all(isinstance(outcome, Done) for (outcome,) in consumer.wait())


def test_lease_is_kept_during_reads(instances: Callable, network: InMemoryNetwork) -> None:
    producer, consumer = (
        instances("p", lease=1.0, expose_cache=False).produce(),
        instances("d", transfer_timeout=30.0).consume(),
    )
    network.faults.delay, network.faults.seconds = 1.0, 0.2
    source, _ = producer.fill("r", 30)
    blocks = consumer.take(30)
    consumer.consumers[0].start("r", source, blocks, 0, 30)
    until = monotonic() + 1.5
    while monotonic() < until and not (ended := consumer.consumers[0].get_finished()):
        assert producer.producers[0].leases.pop_ended() == {}
        sleep(0.01)
    ended = ended or consumer.wait()[0]
    assert isinstance(ended[0], Done)
    assert ended[0].seconds > 1.0


def test_declined_blocks_are_freed(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d", tp=2).consume()
    source, _ = producer.fill("r", 17)
    consumer.consumers[0].release(source)
    sleep(0.1)
    assert producer.producers[0].leases.pop_ended() == {}
    consumer.consumers[1].release(source)
    assert producer.all_free("r")


def test_reader_before_the_grant_waits(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d").consume()
    blocks = consumer.take(8)
    consumer.consumers[0].start("r", producer.source("r"), blocks, 0, 8)
    sleep(0.1)
    producer.fill("r", 8)
    ((outcome,),) = consumer.wait()
    assert isinstance(outcome, Done)
