# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transfers at the same time: buffers of a rank's siblings, and many, slow and dead peers."""

import random
import re
from collections.abc import Callable
from time import monotonic, sleep

import pytest
import zmq
from ascend_kv_connector.p2p.peers import MAX_IDLE_THREADS, CircuitBreaker
from ascend_kv_connector.p2p.protocol import CODEC, Owner
from ascend_kv_connector.p2p.transfers import Done, Failed, Source
from ascend_transfer.errors import TransferError
from ascend_transfer.memory import MAX_QUARANTINED
from ascend_transfer.rpc import RpcServer
from harness.kv.memory_transport import InMemoryNetwork
from harness.kv.prompts import Prompt


def test_siblings_do_not_return_each_others_buffers(
    instances: Callable, network: InMemoryNetwork
) -> None:
    """Several requests of one engine read a source at once, some give up: what the others read is
    not packed anew meanwhile."""
    producer = instances("p", expose_cache=False, slots=2, lease=60.0, blocks=400).produce()
    consumer = instances(
        "d", expose_cache=False, lanes=4, blocks=400, transfer_timeout=30.0
    ).consume()
    network.faults.delay, network.faults.seconds = 0.5, 0.02
    draw = random.Random(5)
    for turn in range(6):
        sources = [producer.fill(f"r{turn}-{number}", 60)[0] for number in range(2)]
        blocks = {f"{turn}-{number}": consumer.take(60) for number in range(5)}
        for number, name in enumerate(blocks):
            consumer.consumers[0].start(name, sources[number == 4], blocks[name], 0, 60)
        sleep(0.02 * draw.random())
        consumer.consumers[0].cancel(f"{turn}-1", TransferError("aborted", "the request has ended"))
        (ended,) = consumer.wait(5)
        assert [outcome.kind for outcome in ended if isinstance(outcome, Failed)] in (
            [],
            ["aborted"],
        ), ended
        for outcome in ended:
            if isinstance(outcome, Done):
                source = sources[outcome.request.endswith("-4")]
                assert consumer.holds(source.request, blocks[outcome.request], 0, 60), (
                    outcome.request
                )
        for number in range(2):
            assert producer.all_free(f"r{turn}-{number}")
        producer.free, consumer.free = list(range(400)), list(range(400))


def test_more_readers_than_buffers_of_a_pipeline(instances: Callable) -> None:
    """Readers that start with different ranks do not wait for each other's buffers."""
    producer = instances(
        "p", expose_cache=False, pp=2, slots=2, chunk_bytes=320, blocks=400
    ).produce()
    readers = [
        instances(
            f"d{number}", expose_cache=False, tp=2, lanes=2, blocks=400, transfer_timeout=15.0
        ).consume()
        for number in range(3)
    ]
    wanted = []
    for reader, consumer in enumerate(readers):
        for number in range(4):
            source, _ = producer.fill(name := f"r{reader}-{number}", 30)
            blocks = consumer.take(30)
            wanted.append((consumer, name, blocks))
            for rank in consumer.consumers:
                rank.start(name, source, blocks, 0, 30)
    for consumer in readers:
        for ended in consumer.wait(4):
            assert all(isinstance(outcome, Done) for outcome in ended), ended
            assert max(outcome.seconds for outcome in ended) < 5.0
    assert all(consumer.holds(name, blocks, 0, 30) for consumer, name, blocks in wanted)


def test_more_producers_than_a_context_has_sockets(instances: Callable) -> None:
    """Each restart of a prefill instance listens on new ports."""
    producer, consumer = instances("p").produce(), instances("d", lanes=1).consume()
    rank = consumer.consumers[0]
    door = RpcServer(CODEC, producer.producers[0].answer, "0.0.0.0")
    blocks = consumer.take(4)
    for number in range(400):
        source, held = producer.fill(f"r{number}", 4)
        source = source._replace(
            ranks=((f"127.0.{1 + number // 200}.{1 + number % 200}", door.port),)
        )
        rank.start(f"r{number}", source, blocks, 0, 4)
        ((outcome,),) = consumer.wait()
        assert isinstance(outcome, Done), (number, outcome)
        producer.free += held
    until = monotonic() + 20.0
    while rank.queues.thread_count > MAX_IDLE_THREADS + 2 and monotonic() < until:
        sleep(0.01)
    assert rank.queues.thread_count <= MAX_IDLE_THREADS + 2
    door.close()


def test_dead_and_slow_peers_affect_only_their_requests(
    instances: Callable, network: InMemoryNetwork
) -> None:
    """With more requests for peers that do not answer, and for peers whose bytes do not arrive,
    than there are lanes."""
    healthy, slow = (
        instances("p", expose_cache=False).produce(),
        [instances(f"s{number}", expose_cache=False).produce() for number in range(3)],
    )
    consumer = instances(
        "d", expose_cache=False, lanes=2, answer_timeout=30.0, transfer_timeout=30.0
    ).consume()
    rank, blocks = consumer.consumers[0], consumer.take(17)
    (local_session,) = {rank.transport.session}
    network.cut.update(
        frozenset((local_session, each.producers[0].transport.session)) for each in slow
    )
    with zmq.Context() as context:
        sockets = [context.socket(zmq.ROUTER) for _ in range(3)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
        for number in range(6):
            dead = Source(f"x{number % 3}", f"dead-{number}", (("127.0.0.1", ports[number % 3]),))
            rank.start(f"dead-{number}", dead, blocks, 0, 17)
            rank.start(
                f"slow-{number}", slow[number % 3].fill(f"slow-{number}", 17)[0], blocks, 0, 17
            )
        own_blocks = {f"r{number}": consumer.take(17) for number in range(2)}
        for name, request_blocks in own_blocks.items():
            rank.start(name, healthy.fill(name, 17)[0], request_blocks, 0, 17)
        (ended,) = consumer.wait(2)
        for outcome in ended:
            assert isinstance(outcome, Done), outcome
            assert outcome.seconds < 10.0
            assert consumer.holds(outcome.request, own_blocks[outcome.request], 0, 17)
        for name in [f"{kind}-{number}" for kind in ("dead", "slow") for number in range(6)]:
            rank.cancel(name, TransferError("aborted", "the test is over"))
        context.destroy(linger=0)


@pytest.mark.parametrize("exposed", [True, False], ids=["direct", "staged"])
def test_forgotten_prompts_do_not_delay_others(exposed: bool, instances: Callable) -> None:
    """Anyone may repeat old parameters."""
    producer = instances("p", expose_cache=exposed).produce()
    consumer = instances(
        "d", expose_cache=exposed, lanes=2, answer_timeout=20.0, transfer_timeout=60.0
    ).consume()
    rank, blocks = consumer.consumers[0], consumer.take(17)
    source, _ = producer.fill("r", 17)
    for number in range(6):
        rank.start(
            f"old-{number}", source._replace(request=f"old-{number}"), consumer.take(4), 0, 4
        )
    sleep(0.5)
    rank.start("r", source, blocks, 0, 17)
    ((outcome,),) = consumer.wait()
    assert isinstance(outcome, Done), outcome
    assert outcome.request == "r"
    assert outcome.seconds < 10.0
    assert consumer.holds("r", blocks, 0, 17)
    for number in range(6):
        rank.cancel(f"old-{number}", TransferError("aborted", "the test is over"))


def test_failures_of_one_outage_count_once() -> None:
    now = [10.0]
    breaker = CircuitBreaker(5.0, lambda: now[0])
    for _ in range(4):  # Side by side: all began before the first one failed.
        breaker.note_failure("no answer", 3.0)
    assert breaker.refusal() == ""
    now[0] = 12.0
    breaker.note_failure("no answer", 11.0)
    assert (
        breaker.refusal()
        == "not contacted: 2 requests in a row failed, the last one 0.0 s ago (no answer)"
    )
    breaker.note_success()
    assert breaker.refusal() == ""


def test_peer_that_failed_twice_is_not_contacted_for_a_while(instances: Callable) -> None:
    producer, consumer = (
        instances("p").produce(),
        instances("d", lanes=1, answer_timeout=0.3).consume(),
    )
    rank, answer = consumer.consumers[0], producer.producers[0].server._handler
    producer.producers[0].server._handler = lambda query: sleep(0.5)
    blocks = consumer.take(4)
    for number in range(6):
        rank.start(f"r{number}", producer.fill(f"r{number}", 4)[0], blocks, 0, 4)
    (ended,) = consumer.wait(6)
    causes = [outcome.cause for outcome in sorted(ended, key=lambda outcome: outcome.request)]
    assert causes[:2] == ["no answer in 0.3 s"] * 2
    refusal = (
        r"not contacted: \d requests in a row failed, the last one \d\.\d s ago \(no answer in"
        r" 0.3 s\)"
    )
    assert re.fullmatch(refusal, causes[2])
    producer.producers[0].server._handler = answer
    until = monotonic() + 20.0
    while monotonic() < until:  # it is tried again
        rank.start("s", producer.fill("s", 4)[0], blocks, 0, 4)
        ((outcome,),) = consumer.wait()
        if isinstance(outcome, Done):
            break
        producer.free, _ = list(range(64)), sleep(0.1)
    assert isinstance(outcome, Done)


def test_failed_reads_take_a_limited_number_of_buffers(
    instances: Callable, network: InMemoryNetwork
) -> None:
    producer, consumer = (
        instances("p", expose_cache=False).produce(),
        instances("d", expose_cache=False, lanes=2).consume(),
    )
    rank, network.faults.late, network.faults.seconds = consumer.consumers[0], 1.0, 5.0
    blocks = consumer.take(4)
    for number in range(MAX_QUARANTINED + 6):
        source, held = producer.fill(f"r{number}", 4)
        producer.free += held
        rank.start(f"r{number}", source, blocks, 0, 4)
        ((outcome,),) = consumer.wait()
        assert outcome.kind == "transport"
    max_buffers = MAX_QUARANTINED + 4
    assert (
        f"all {max_buffers} receive buffers are in use or quarantined after failed reads"
        in outcome.cause
    )
    assert outcome.seconds < 10
    assert len(rank.transport._memory) == max_buffers
    network.faults.late, until = 0.0, monotonic() + 60.0
    while monotonic() < until:  # until the first bytes have arrived
        source, held = producer.fill("s", 4)
        rank.start("s", source, blocks, 0, 4)
        if isinstance(consumer.wait()[0][0], Done):
            break
        producer.free += held
        sleep(0.1)
    assert consumer.holds("s", blocks, 0, 4)


@pytest.mark.parametrize("layerwise", [False, True])
def test_queue_of_the_peer_does_not_shorten_a_loan(layerwise: bool, instances: Callable) -> None:
    """A buffer is lent from when it is free, which may be long after it was first asked for."""
    options = {
        "answer_timeout": 1.0,
        "transfer_timeout": 30.0,
        "lease": 60.0,
        "slots": 1,
        "expose_cache": False,
    }
    producer, consumer = instances("p", **options).produce(), instances("d", **options).consume()
    rank, other = producer.producers[0], Owner("other", "x", 0, "y")
    assert rank._buffers.acquire(other, 1000.0)
    blocks = consumer.take(8)
    if layerwise:
        prompt = Prompt(producer, "r", 8)
        prompt.compute(8)
        prompt.announce(consumer)
        consumer.consumers[0].start("r", None, blocks, 0, 8)
    else:
        consumer.consumers[0].start("r", producer.fill("r", 8)[0], blocks, 0, 8)
    sleep(4.0)  # Longer than a loan of 3 s.
    rank._buffers.release(other)
    ((outcome,),) = consumer.wait()
    assert isinstance(outcome, Done), outcome
    assert consumer.holds("r", blocks, 0, 8)
