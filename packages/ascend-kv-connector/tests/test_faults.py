"""Hundreds of requests under faults: each ends in time, rightly or with its cause, and nothing is left behind."""

import random
from collections import Counter
from collections.abc import Callable
from time import monotonic, sleep

import pytest
from ascend_kv_connector.memory import Faults, MemoryNetwork
from ascend_kv_connector.transfers import Done, Failed

REQUESTS = 500
TIMEOUT = 1.0
LATE = 0.5
"""Seconds after its deadline by which a transfer must have been reported on this machine, however busy."""


SHAPES = {
    "1 to 1": ({}, {}),
    "2 to 1": ({"tp": 2}, {}),
    "1 to 2": ({}, {"tp": 2}),
    "1 to 1, without checksums": ({}, {"verify": False}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_request_ends_rightly_or_with_its_cause(
    shape: str, instances: Callable, network: MemoryNetwork, record_property: Callable
) -> None:
    shapes = SHAPES[shape]
    count = REQUESTS if shape.startswith("1 to 1") else REQUESTS // 5
    corrupt = 0.02 if shapes[1].get("verify", True) else 0.0
    draw = random.Random(7)
    network.faults = Faults(draw=random.Random(3), fail=0.02, corrupt=corrupt, delay=0.03, late=0.02, hang=0.004, seconds=0.02)
    producer = instances("p", blocks=400, lease=3.0, **shapes[0]).produce()
    options = {"transfer_timeout": TIMEOUT, "verify": True, "lanes": 4} | shapes[1]
    consumer = instances("d", blocks=400, **options).consume()
    waiting = [(f"r{number}", draw.choice([1, 3, 9, 17, 40])) for number in range(count)]
    running: dict[str, tuple] = {}
    held: dict[str, list[int]] = {}
    counts: Counter[str] = Counter()
    wrong = []
    while waiting or running or held:
        while waiting and len(running) < 8 and len(producer.free) > 20:
            name, tokens = waiting.pop()
            seconds = 0.001 if draw.random() < 0.02 else 3.0
            source, held[name] = producer.fill(name, tokens, seconds)
            if draw.random() < 0.02:
                counts["declined"] += 1
                for rank in consumer.consumers:
                    rank.decline(source)
                continue
            start = tokens // 2 // 4 * 4
            blocks = consumer.take(tokens - start)
            running[name] = (blocks, start, tokens, monotonic(), [])
            for rank in consumer.consumers:
                rank.start(name, source, blocks, start, tokens)
        for rank in consumer.consumers:
            for outcome in rank.take():
                running[outcome.request][4].append(outcome)
        for name, (blocks, start, tokens, began, outcomes) in list(running.items()):
            if len(outcomes) < len(consumer.consumers):
                assert monotonic() - began < TIMEOUT + LATE, f"{name} has not ended"
                continue
            del running[name]
            failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
            counts[failed[0].kind if failed else "done"] += 1
            missing = {block for outcome in failed for block in outcome.blocks}
            good = next((place for place, block in enumerate(blocks) if block in missing), len(blocks)) * 4
            if not consumer.holds(name, blocks[: -(-good // 4)], start, min(start + good, tokens)):
                wrong.append((name, outcomes))
            consumer.free += blocks
        for rank, freed in zip(producer.producers, producer.freed, strict=True):
            freed.update(rank.leases.ended())
        for name in [name for name in held if all(name in freed for freed in producer.freed)]:
            producer.free += held.pop(name)
        sleep(0.001)
    network.faults.hung.set()
    print(f"{count} requests: {dict(counts)}; reads by fault: {network.faults.counts}")
    for kind, number in counts.items():
        record_property(kind, number)
    assert wrong == []
    assert counts["done"] > count * 0.6
    assert wait_until(lambda: all(len(rank.leases) == 0 and rank.lent == 0 for rank in producer.producers), 1.0)
    assert len(set(producer.free)) == len(set(consumer.free)) == 400
    if count == REQUESTS:
        assert {"done", "transport", "lease", "deadline", "declined"} == set(counts) - {"verify"}
        assert counts["verify"] == network.faults.counts.get("corrupt", 0)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    until = monotonic() + seconds
    while not condition() and monotonic() < until:
        sleep(0.005)
    return condition()


def test_done_is_done_once(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d").consume()
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    assert isinstance(consumer.wait()[0][0], Done)
    assert consumer.consumers[0].take() == []
