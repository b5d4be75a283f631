# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transfers from peers that fail, stop or do not respond."""

from collections.abc import Callable
from time import monotonic, sleep

from ascend_kv_connector.p2p.transfers import Done, Failed, Source
from harness.kv.memory_transport import InMemoryNetwork
from harness.kv.prompts import wait_for


def fails(
    instances: Callable, act: Callable, tokens: int = 17, **options: object
) -> tuple[Failed, float]:
    """Outcome and duration of one failing transfer; ``act(producer, consumer)`` causes the
    failure."""
    producer, consumer = instances("p").produce(), instances("d", **options).consume()
    source, _ = producer.fill("r", tokens)
    source = act(producer, consumer) or source
    blocks = consumer.take(tokens)
    began = monotonic()
    consumer.consumers[0].start("r", source, blocks, 0, tokens)
    ((outcome,),) = consumer.wait()
    took = monotonic() - began
    assert isinstance(outcome, Failed)
    assert set(outcome.blocks) <= set(blocks)
    sleep(0.1)
    assert consumer.consumers[0].get_finished() == []
    return outcome, took


def test_failure_message_has_all_details(instances: Callable, network: InMemoryNetwork) -> None:
    network.faults.fail = 1.0
    outcome, _ = fails(instances, lambda producer, consumer: None)
    line = str(outcome)
    assert outcome.kind == "transport"
    assert len(outcome.blocks) == 5
    for part in (
        "r failed after",
        "closed the connection",
        "of engine p",
        "transport memory",
        "0.0 of 0.0 MiB",
        "5 blocks",
    ):
        assert part in line
    assert "\n" not in line


def test_stopped_peer(instances: Callable) -> None:
    outcome, took = fails(
        instances,
        lambda producer, consumer: producer.close(),
        answer_timeout=30.0,
        transfer_timeout=30.0,
    )
    assert (outcome.kind, outcome.cause) == ("peer", "nothing listens at its address (5 attempts)")
    assert took < 15


def test_peer_with_an_invalid_address(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d", lanes=1).consume()
    consumer.consumers[0].start(
        "r", Source("p", "r", (("no such host!", 1 << 20),)), consumer.take(8), 0, 8
    )
    assert consumer.wait()[0][0].kind == "peer"
    source, _ = producer.fill("s", 8)
    consumer.consumers[0].start("s", source, consumer.take(8), 0, 8)
    assert isinstance(consumer.wait()[0][0], Done)


def test_peer_stopping_during_a_transfer(instances: Callable, network: InMemoryNetwork) -> None:
    producer, consumer = (
        instances("p", expose_cache=False).produce(),
        instances("d", answer_timeout=30.0, transfer_timeout=30.0).consume(),
    )
    network.faults.delay, network.faults.seconds = 1.0, 0.1
    source, _ = producer.fill("r", 40)
    consumer.consumers[0].start("r", source, consumer.take(40), 0, 40)
    transfer = consumer.consumers[0]._transfers["r"]
    assert wait_for(lambda: transfer.size > 0)
    producer.producers[0].close()
    ((outcome,),) = consumer.wait()
    assert outcome.kind == "peer"
    assert outcome.cause in (
        "the peer closed the connection",
        "nothing listens at its address (5 attempts)",
    )  # whichever is detected first
    assert 0 < outcome.size < outcome.total
    assert outcome.seconds < 15


def test_unresponsive_peer(instances: Callable) -> None:
    def hold(producer: object, consumer: object) -> None:
        producer.producers[0].server._handler = lambda question: sleep(1.0)  # type: ignore[attr-defined]

    outcome, took = fails(instances, hold, answer_timeout=0.4)
    assert (outcome.kind, outcome.cause) == ("peer", "no answer in 0.4 s")
    assert took < 10


def test_restarted_peer_is_reconnected(instances: Callable, network: InMemoryNetwork) -> None:
    producer, consumer = instances("p").produce(), instances("d", lanes=1).consume()
    for name in ("r", "s"):
        source, _ = producer.fill(name, 17)
        consumer.consumers[0].start(name, source, consumer.take(17), 0, 17)
        assert isinstance(consumer.wait()[0][0], Done)
        port = producer.producers[0].server.port
        producer.close()
        producer.produce(port=port)
        sleep(0.3)  # ZMQ reconnects


def test_missing_session(instances: Callable, network: InMemoryNetwork) -> None:
    outcome, _ = fails(instances, lambda producer, consumer: network.killed.add("localhost:0"))
    assert outcome.kind == "transport"


def test_cut_link_ends_at_the_deadline(instances: Callable, network: InMemoryNetwork) -> None:
    link = frozenset(("localhost:0", "localhost:1"))
    outcome, took = fails(instances, lambda *both: network.cut.add(link), transfer_timeout=0.5)
    assert outcome.kind in ("deadline", "transport")
    assert 0.4 < took < 10


def test_hanging_read_ends_at_the_deadline_and_blocks_no_other(
    instances: Callable, network: InMemoryNetwork
) -> None:
    producer, consumer = (
        instances("p", expose_cache=False).produce(),
        instances("d", transfer_timeout=2.0, lanes=1, expose_cache=False).consume(),
    )
    network.faults.hang = 1.0
    source, _ = producer.fill("r", 17)
    blocks = consumer.take(17)
    consumer.consumers[0].start("r", source, blocks, 0, 17)
    ((outcome,),) = consumer.wait()
    assert outcome.kind == "deadline"
    assert 1.9 < outcome.seconds < 10
    network.faults.hang = 0.0
    second, _ = producer.fill("s", 17)
    # The same blocks, because vLLM may reuse them at once.
    consumer.consumers[0].start("s", second, blocks, 0, 17)
    ((done,),) = consumer.wait()
    assert isinstance(done, Done)
    network.faults.hung.set()  # the first read returns now
    sleep(0.2)
    assert consumer.holds("s", blocks, 0, 17)


def test_late_bytes_are_not_written_to_the_cache(
    instances: Callable, network: InMemoryNetwork
) -> None:
    producer, consumer = (
        instances("p").produce(),
        instances("d", lanes=1, expose_cache=False).consume(),
    )
    blocks = consumer.take(17)
    network.faults.late, network.faults.seconds = 1.0, 0.1
    first, _ = producer.fill("r", 17)
    consumer.consumers[0].start("r", first, blocks, 0, 17)
    ((failed,),) = consumer.wait()
    assert failed.kind == "transport"
    network.faults.late = 0.0
    for number in range(10):
        again, _ = producer.fill(f"s{number}", 17)
        consumer.consumers[0].start(f"s{number}", again, blocks, 0, 17)
        ((done,),) = consumer.wait()
        assert isinstance(done, Done)
        assert consumer.holds(f"s{number}", blocks, 0, 17)
        sleep(0.02)
        producer.free = list(range(64))


def test_checksums_detect_corruption(instances: Callable, network: InMemoryNetwork) -> None:
    network.faults.corrupt = 1.0
    outcome, _ = fails(instances, lambda producer, consumer: None, verify=True)
    assert outcome.kind == "verify"
    assert outcome.size == 0


def test_blocks_before_the_failure_count_as_loaded(
    instances: Callable, network: InMemoryNetwork
) -> None:
    producer, consumer = (
        instances("p", expose_cache=False).produce(),
        instances("d", chunk_bytes=640, lanes=1, expose_cache=False).consume(),
    )  # four tokens per chunk
    reads = iter([0.0, 0.0, 1.0])

    class Third:
        def random(self) -> float:
            return 1.0 - next(reads)

    network.faults.draw, network.faults.fail = Third(), 0.5  # type: ignore[assignment]
    source, _ = producer.fill("r", 17)
    blocks = consumer.take(17)
    consumer.consumers[0].start("r", source, blocks, 0, 17)
    ((failed,),) = consumer.wait()
    token = consumer.caches[0].token_bytes(range(4), 4)
    loaded = failed.size // token
    assert loaded >= 4
    assert failed.blocks == tuple(blocks[loaded // 4 :])
    assert consumer.holds("r", blocks, 0, loaded)


def test_no_partial_results_with_sliding_windows(
    instances: Callable, network: InMemoryNetwork
) -> None:
    shape = {"windows": (0, 6), "chunk_bytes": 200, "expose_cache": False}
    producer, consumer = instances("p", **shape).produce(), instances("d", **shape).consume()
    source, _ = producer.fill("r", 30)
    blocks = consumer.take(30)
    reads = iter([1.0] * 16)  # All 15 of the first layer, and one of the other.

    class HangAfterwards:
        def random(self) -> float:
            return next(reads, 0.0)

    network.faults.draw, network.faults.hang = HangAfterwards(), 0.5  # type: ignore[assignment]
    consumer.consumers[0].start("r", source, blocks, 0, 30)
    assert wait_for(lambda: "hang" in network.faults.counts)
    network.killed.add(producer.producers[0].transport.session)
    network.faults.hung.set()  # The next read finds no session.
    ((outcome,),) = consumer.wait()
    assert (outcome.kind, outcome.blocks) == ("transport", tuple(blocks))
    assert 30 * 80 < outcome.size < outcome.total


def test_expired_lease(instances: Callable) -> None:
    def wait(producer: object, consumer: object) -> Source:
        source, _ = producer.fill("old", 17, seconds=0.05)  # type: ignore[attr-defined]
        sleep(0.1)
        assert producer.all_free("old")  # type: ignore[attr-defined]
        return source

    outcome, _ = fails(instances, wait)
    assert outcome.kind == "lease"
    assert "the lease of 0.05 s has expired" in outcome.cause
