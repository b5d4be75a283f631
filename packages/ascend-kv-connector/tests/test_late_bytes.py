# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Bytes of failed reads and writes that arrive late: blocks and buffers are not used again before
all have arrived."""

import logging
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import pytest
from ascend_kv_connector.p2p.consumer import push_stop
from ascend_kv_connector.p2p.consumer.connections import Notice
from ascend_kv_connector.p2p.consumer.fetcher import Fetcher
from ascend_kv_connector.p2p.consumer.push_stop import PushStop
from ascend_kv_connector.p2p.protocol import Release
from ascend_kv_connector.p2p.transfers import Done, Failed, Source
from ascend_transfer.errors import TransferError
from harness.kv.memory_transport import InMemoryNetwork
from harness.kv.prompts import Prompt, wait_for

NEXT = -3
"""Contents of the request that has the blocks next."""


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_stop, "LINGER_SECONDS", 0.5)
    monkeypatch.setattr(push_stop, "RETRY_SECONDS", (0.05, 0.1))


def settle(consumer: Any, seconds: float = 30.0) -> float:
    """Wait until the transfer's blocks may be used again, and use them; returns the seconds that it
    took."""
    rank, began = consumer.consumers[0], monotonic()
    while not rank.pop_settled():
        assert monotonic() < began + seconds
        rank.get_finished()
        sleep(0.005)
    for cache in consumer.caches[0].caches:
        cache.fill_(NEXT)
    return monotonic() - began


def is_unchanged(consumer: Any) -> bool:
    return all(bool((cache == NEXT).all()) for cache in consumer.caches[0].caches)


def pushing(instances: Callable, **options: Any) -> tuple[Any, Any, Prompt, list[int]]:
    """Both instances, and a prompt of which the first has computed nothing yet, for the blocks of
    the other."""
    producer, consumer = instances("p", **options).produce(), instances("d", **options).consume()
    prompt, blocks = Prompt(producer, "r", 40), consumer.take(40)
    consumer.consumers[0].start("r", None, blocks, 0, 40)
    prompt.announce(consumer)
    return producer, consumer, prompt, blocks


@pytest.mark.parametrize("late", [False, True], ids=["aborted", "after the deadline"])
def test_blocks_are_kept_until_a_write_in_progress_has_ended(
    late: bool, instances: Callable, network: InMemoryNetwork, short_waits: None
) -> None:
    network.faults.hang = 1.0
    _, consumer, prompt, _ = pushing(
        instances, transfer_timeout=3.0 if late else 30.0, answer_timeout=1.0
    )
    rank = consumer.consumers[0]
    prompt.compute(40)
    assert wait_for(lambda: bool(network.faults.counts))
    if not late:
        rank.cancel("r", TransferError("aborted", "the request has ended"))
    ((outcome,),) = consumer.wait()
    assert outcome.kind == ("deadline" if late else "aborted")
    for _ in range(150):
        assert not rank.pop_settled()
        sleep(0.01)
    assert rank.gauges()["unsettled_blocks"] == 10
    network.faults.hung.set()  # the write goes on
    settle(consumer)
    sleep(0.3)
    assert is_unchanged(consumer)


@pytest.mark.parametrize("cancelled", [False, True])
def test_failed_write_may_still_arrive(
    cancelled: bool, instances: Callable, network: InMemoryNetwork, short_waits: None
) -> None:
    """The reader keeps the blocks also if it gave the transfer up while the write was in
    progress."""
    network.faults.late, network.faults.seconds = 1.0, 2.0
    producer, consumer, prompt, blocks = pushing(instances)
    rank, write = consumer.consumers[0], producer.producers[0].transport.write

    def slow_write(*arguments: Any) -> None:
        if cancelled:
            rank.cancel("r", TransferError("aborted", "the request has ended"))
        write(*arguments)

    producer.producers[0].transport.write = slow_write
    began = monotonic()
    prompt.compute(40)
    ((outcome,),) = consumer.wait()
    assert (outcome.kind, outcome.blocks) == (
        "aborted" if cancelled else "transport",
        tuple(blocks),
    )
    settle(consumer)
    assert monotonic() - began > 2.4  # The arrival of the bytes, and the time for those in transit.
    sleep(0.5)
    assert is_unchanged(consumer)


@pytest.mark.parametrize(
    "successor", [False, True], ids=["nothing listens", "another instance has the port"]
)
def test_blocks_are_free_once_their_writer_has_died(
    successor: bool,
    instances: Callable,
    network: InMemoryNetwork,
    short_waits: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push_stop, "LINGER_SECONDS", 2.0)
    network.faults.hang = 1.0
    producer, consumer, prompt, _ = pushing(instances, transfer_timeout=30.0, answer_timeout=1.0)
    prompt.compute(40)
    assert wait_for(lambda: bool(network.faults.counts))
    rank = producer.producers[0]
    rank.server.close()
    if successor:
        instances("q").produce(port=rank.server.port)
    ((outcome,),) = consumer.wait()
    assert outcome.kind == "peer"
    assert settle(consumer) > 1.0  # The bytes that it sent may still arrive.


def test_pause_of_the_reader_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that arrived before the pause are read after it."""
    now = [1000.0]
    monkeypatch.setattr(push_stop, "monotonic", lambda: now[0])
    stop = PushStop(Source("p", "r", ()), Release("r", "d", 0, "t"), [("h", 1)], lambda stop: None)
    stop._has_ended = lambda *arguments: True  # type: ignore[method-assign]
    stop.ask(None, 1.0)  # type: ignore[arg-type]
    now[0] += 500.0
    assert not stop.settled()
    for _ in range(int(push_stop.LINGER_SECONDS) - 2):
        now[0] += 1.0
        assert not stop.settled()
    now[0] += 1.5
    assert stop.settled()


def test_peer_that_was_paused_is_told(instances: Callable) -> None:
    """ZMQ gives up a connection to a paused peer, which its client takes for a refusal."""
    producer, consumer = instances("p").produce(), instances("d").consume()
    source, _ = producer.fill("r", 8)
    rank, fetcher = consumer.consumers[0], Fetcher(consumer.consumers[0])
    clients = fetcher._connections.clients
    stop = PushStop(source, Release("r", "d", 0, "t"), source.ranks, lambda stop: None)
    for _ in range(2):
        clients.get(source.ranks[0])._rejected = True
        stop.ask(clients, 5.0)
        assert len(stop.left) == 1
    stop.ask(clients, 5.0)
    assert not stop.left
    clients.get(source.ranks[0])._rejected = True
    fetcher.run(Notice(source, rank.finish_message(source)))
    assert len(producer.producers[0].leases) == 1
    fetcher.run(Notice(source, rank.finish_message(source)))
    assert producer.all_free("r")
    fetcher.close()


def test_late_push_is_stopped_at_once(instances: Callable) -> None:
    """The reader's Finish, which comes while the prefill instance waits for the write to end,
    leaves the query to stop it."""
    producer, consumer, prompt, _ = pushing(instances, transfer_timeout=1.0, answer_timeout=5.0)
    rank = producer.producers[0]
    write, writing = rank.transport.write, []

    def slow_write(*arguments: Any) -> None:
        writing.append(arguments)
        sleep(3.0)
        write(*arguments)

    rank.transport.write = slow_write
    prompt.compute(40)
    assert wait_for(lambda: bool(writing))
    ((outcome,),) = consumer.wait()
    assert outcome.kind == "deadline"
    assert settle(consumer) < 10.0
    sleep(0.5)
    assert is_unchanged(consumer)


def test_preempted_prompt_is_rewritten_after_a_stalled_write(instances: Callable) -> None:
    """The prefill instance does not wait for the write, whose bytes do not count."""
    producer, consumer, prompt, blocks = pushing(instances)
    rank = producer.producers[0]
    write, writing, freed = rank.transport.write, [], []

    def slow_write(*arguments: Any) -> None:
        writing.append(arguments)
        assert len(writing) > 1 or wait_for(lambda: bool(freed), 20.0)
        write(*arguments)

    rank.transport.write = slow_write
    prompt.compute(17, "layers.0")
    assert wait_for(lambda: bool(writing))
    began = monotonic()
    rank.leases.revoke("r-far")
    assert monotonic() - began < 1.0
    for cache in producer.caches[0].caches:
        cache.fill_(-7)  # another prompt's
    again = Prompt(producer, "r", 40)
    freed.append(True)
    again.compute(40)
    ((outcome,),) = consumer.wait()
    assert isinstance(outcome, Done), outcome
    assert consumer.holds("r", blocks, 0, 40)


def test_chunk_of_a_preempted_prompt_is_packed_again(instances: Callable) -> None:
    producer, consumer, prompt, blocks = pushing(instances, expose_cache=False)
    rank, cache = producer.producers[0], producer.caches[0]
    pack, packed = cache.pack, []

    def preempted_pack(*arguments: Any) -> int:
        packed.append(arguments)
        if len(packed) == 1:
            rank.leases.revoke("r-far")
            for each in cache.caches:
                each.fill_(-7)
            size = pack(*arguments)
            Prompt(producer, "r", 40).compute(40)
            return size
        return pack(*arguments)

    cache.pack = preempted_pack
    prompt.compute(17)
    ((outcome,),) = consumer.wait()
    assert isinstance(outcome, Done), outcome
    assert consumer.holds("r", blocks, 0, 40)
    assert rank.buffers_in_use == 0


def test_failed_reads_keep_a_limited_part_of_the_cache(
    instances: Callable, network: InMemoryNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond that, bytes go through receive buffers, which are limited too."""
    producer, consumer = instances("p").produce(), instances("d").consume()
    rank, network.faults.late, network.faults.seconds = consumer.consumers[0], 1.0, 3.0
    for name in ("a", "b"):
        rank.start(name, producer.fill(name, 20)[0], consumer.take(20), 0, 20)
        assert isinstance(consumer.wait()[0][0], Failed)
    network.faults.late = 0.0
    with caplog.at_level(logging.ERROR):
        logging.getLogger("vllm").propagate, before = True, logging.getLogger("vllm").propagate
        rank.start("c", producer.fill("c", 20)[0], blocks := consumer.take(20), 0, 20)
        ((outcome,),) = consumer.wait()
        logging.getLogger("vllm").propagate = before
    assert (outcome.copied, outcome.size) == (outcome.size, outcome.size)
    assert consumer.holds("c", blocks, 0, 20)
    assert "10 KV cache blocks of 64 are kept from use" in caplog.text
    settled = set[str]()
    assert wait_for(
        lambda: bool(settled.update(rank.pop_settled()) or settled == {"a", "b", "c"}), 20.0
    )
    rank.start("d", producer.fill("d", 20)[0], consumer.take(20), 0, 20)
    assert consumer.wait()[0][0].copied == 0
