# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Reads of exposed KV cache: without staging, confirmed by the lease, and blocks that a failed read
may still write to."""

import random
from collections.abc import Callable
from time import monotonic, sleep

import numpy
import pytest
import torch
from ascend_kv_connector.p2p.protocol import Locate, Refused
from ascend_kv_connector.p2p.runs import Placement, plan_runs
from ascend_kv_connector.p2p.transfers import Done
from ascend_transfer.engine import Runs
from harness.kv.memory_transport import InMemoryNetwork
from harness.kv.prompts import wait_for

COPIES = {
    "same": ({}, {}, 0, 0),
    "pp 2 to 1": ({"pp": 2}, {}, 0, 0),
    "other block size": ({"block_size": 8}, {"block_size": 2, "blocks": 128}, 0, 0),
    "tp 2 to 1: into a buffer here": ({"tp": 2}, {}, 0, 1),
    "tp 1 to 2: from a buffer there": ({}, {"tp": 2}, 1, 0),
    "not exposed there": ({"expose_cache": False}, {}, 1, 0),
    "not exposed here": ({}, {"expose_cache": False}, 0, 1),
    "neither": ({"expose_cache": False}, {"expose_cache": False}, 1, 1),
    "checksums": ({}, {"verify": True}, 1, 1),
}


@pytest.mark.parametrize("layout", COPIES)
def test_copies_and_messages(layout: str, instances: Callable) -> None:
    """Copies of each byte by device operations on either side, and messages to a rank with
    connections open."""
    one, other, packed, unpacked = COPIES[layout]
    producer, consumer = (
        instances("p", chunk_bytes=8192, **one).produce(),
        instances("d", chunk_bytes=8192, **other).consume(),
    )
    for name in ("first", "second"):
        source, _ = producer.fill(name, 30)
        before = sum(rank.copied_bytes for rank in producer.producers)
        sent = sum(rank.sent_bytes for rank in producer.producers)
        blocks = consumer.take(30)
        for rank in consumer.consumers:
            rank.start(name, source, blocks, 0, 30)
        outcomes = [outcome for ended in consumer.wait() for outcome in ended]
        assert consumer.holds(name, blocks, 0, 30)
    size = sum(outcome.size for outcome in outcomes)
    assert sum(rank.sent_bytes for rank in producer.producers) - sent == size
    assert sum(rank.copied_bytes for rank in producer.producers) - before == packed * size
    assert sum(outcome.copied for outcome in outcomes) == unpacked * size
    ranks = len(producer.producers)
    # Locate and Confirm, or Fetch and Release.
    assert [outcome.messages for outcome in outcomes] == [2 * ranks] * len(outcomes)


def test_blocks_that_were_freed_during_a_read_are_not_loaded(
    instances: Callable, network: InMemoryNetwork
) -> None:
    """The reader's bytes may be of another prompt, which has the blocks by then."""
    producer, consumer = instances("p", lease=60.0).produce(), instances("d").consume()
    network.faults.hang = 1.0
    source, held = producer.fill("r", 17)
    blocks = consumer.take(17)
    consumer.consumers[0].start("r", source, blocks, 0, 17)
    assert wait_for(lambda: bool(network.faults.counts))
    producer.producers[0].leases.finish("r", "another", 0, 1)
    producer.producers[0].leases.finish("r", "d", 0, 1)
    assert "r" in producer.producers[0].leases.pop_ended()
    producer.free = held + producer.free
    producer.fill("s", 17)
    network.faults.hung.set()
    ((outcome,),) = consumer.wait()
    assert (outcome.kind, outcome.blocks) == ("lease", tuple(blocks))
    assert (
        outcome.cause
        == "the request's blocks were freed while they were read: all readers have released it"
    )


def test_request_id_that_is_used_again_has_another_lease(
    instances: Callable, network: InMemoryNetwork
) -> None:
    producer, consumer = instances("p", lease=60.0).produce(), instances("d").consume()
    network.faults.hang = 1.0
    source, _ = producer.fill("r", 17)
    consumer.consumers[0].start("r", source, consumer.take(17), 0, 17)
    assert wait_for(lambda: bool(network.faults.counts))
    producer.producers[0].leases.finish("r", "d", 0, 1)
    producer.producers[0].leases.pop_ended()
    producer.fill("r", 17)
    network.faults.hung.set()
    assert consumer.wait()[0][0].kind == "lease"


@pytest.mark.parametrize("fault", ["late", "hang"])
def test_blocks_are_kept_while_a_failed_read_may_write_to_them(
    fault: str, instances: Callable, network: InMemoryNetwork
) -> None:
    producer, consumer = (
        instances("p").produce(),
        instances("d", lanes=1, transfer_timeout=1.0).consume(),
    )
    rank = consumer.consumers[0]
    setattr(network.faults, fault, 1.0)
    network.faults.seconds = 0.6
    blocks, began = consumer.take(17), monotonic()
    rank.start("r", producer.fill("r", 17)[0], blocks, 0, 17)
    ((outcome,),) = consumer.wait()
    assert outcome.kind == {"late": "transport", "hang": "deadline"}[fault]
    assert monotonic() - began < 10  # the client has its error
    if fault == "hang":
        sleep(0.5)
        assert rank.pop_settled() == set()
        network.faults.hung.set()
    until, settled = monotonic() + 20, set[str]()
    while not settled and monotonic() < until:
        settled |= rank.pop_settled()
        sleep(0.005)
    assert settled == {"r"}
    assert rank.pop_settled() == set()
    for cache in consumer.caches[0].caches:
        cache.fill_(-3)  # the next request's
    sleep(0.7)
    assert all(bool((cache == -3).all()) for cache in consumer.caches[0].caches)


def test_finished_transfers_are_settled_at_once(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d").consume()
    consumer.consumers[0].start("r", producer.fill("r", 17)[0], consumer.take(17), 0, 17)
    assert consumer.consumers[0].pop_settled() == set()
    assert isinstance(consumer.wait()[0][0], Done)
    assert consumer.consumers[0].pop_settled() == {"r"}


def test_locate_outside_the_lease_is_refused(instances: Callable) -> None:
    rank = (producer := instances("p").produce()).producers[0]
    producer.fill("r", 8)
    good = {"request": "r", "reader": "x", "start": 0, "stop": 8, "regions": [0]}
    assert not isinstance(rank.answer(Locate(**good)), Refused)
    for bad in (
        {"stop": 9},
        {"start": -1},
        {"start": 8},
        {"regions": [4]},
        {"regions": [-1]},
        {"regions": []},
        {"regions": [0, 0]},
    ):
        with pytest.raises(Exception, match="invalid fetch"):
            rank.answer(Locate(**(good | bad)))
    closed = instances("q", expose_cache=False).produce().producers[0]
    assert (
        closed.answer(Locate(**good)).cause == "the prefill instance does not expose its KV cache"
    )


def test_runs_are_the_tokens_bytes() -> None:
    """Of random tables, block sizes and gaps, against copies of one token after another."""
    draw = random.Random(3)
    for _ in range(200):
        tokens, regions = draw.randrange(1, 60), draw.randrange(1, 4)
        sizes = [draw.choice([1, 2, 6]) for _ in range(regions)]
        memory, places, homes = [], [], []
        for _ in range(2):
            block = draw.choice([1, 2, 4, 64])
            strides = [block * size + draw.choice([0, 3]) for size in sizes]
            memory.append(
                [torch.randint(0, 255, (64 * stride,), dtype=torch.uint8) for stride in strides]
            )
            slots = numpy.array(
                sorted(draw.sample(range(64 * block), tokens))
                if draw.random() < 0.5
                else numpy.arange(tokens)
            )
            regions_of = [
                (each.data_ptr(), stride) for each, stride in zip(memory[-1], strides, strict=True)
            ]
            places.append(Placement(regions_of, block, slots))
            homes.append(
                [
                    [int(slot) // block * stride + int(slot) % block * size for slot in slots]
                    for stride, size in zip(strides, sizes, strict=True)
                ]
            )
        runs = plan_runs(places[0], places[1], sizes)
        got = dict[int, int]()
        for remote, local, size in zip(*runs, strict=True):
            got |= {local + each: remote + each for each in range(size)}
        wanted = {
            memory[1][region].data_ptr() + there + byte: memory[0][region].data_ptr() + here + byte
            for region in range(regions)
            for here, there in zip(homes[0][region], homes[1][region], strict=True)
            for byte in range(sizes[region])
        }
        assert got == wanted
    dense = Placement([(1000, 8), (5000, 16)], 4, numpy.arange(12))
    assert plan_runs(dense, Placement.packed(0, 12, [2, 4]), [2, 4]) == Runs(
        [1000, 5000], [0, 24], [24, 48]
    )
