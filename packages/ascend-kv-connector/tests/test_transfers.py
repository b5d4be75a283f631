# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transfers between instances of different parallel layouts, and their failures."""

import random
from collections.abc import Callable
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
import torch
import zmq
from ascend_kv_connector.p2p.paged_cache import Heads, plan_fetches
from ascend_kv_connector.p2p.protocol import CODEC, VERSION, Fetch, Handshake, Refused
from ascend_kv_connector.p2p.transfers import Done, Failed, Source
from ascend_kv_connector.p2p.worker import P2PWorker, model_fingerprint
from ascend_kv_connector.testing.transport import InMemoryNetwork
from ascend_platform.transfer.memory import allocate_buffer
from transformers import PretrainedConfig

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
    sleep(0.3)
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
    assert (outcome.kind, 1.9 < outcome.seconds < 10) == ("deadline", True)
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
    network.faults.delay, network.faults.seconds = 1.0, 0.02
    consumer.consumers[0].start("r", source, blocks, 0, 30)
    sleep(0.3)
    network.killed.add(producer.producers[0].transport.session)
    ((outcome,),) = consumer.wait()
    assert (outcome.kind, outcome.blocks) == ("transport", tuple(blocks))
    assert outcome.size > 8 * 80  # more than some blocks


def test_tokens_outside_a_window_are_refused(instances: Callable) -> None:
    producer, consumer = (
        instances("p", windows=(0, 6)).produce(),
        instances("d", windows=(0, 20)).consume(),
    )
    source, _ = producer.fill("r", 30)
    consumer.consumers[0].start("r", source, consumer.take(30), 0, 30)
    ((outcome,),) = consumer.wait()
    assert outcome.kind == "lease"
    assert outcome.cause.startswith("some of tokens 8 to 30 have left the window of 6")


def test_single_group_cannot_read_from_several_groups(instances: Callable) -> None:
    producer, consumer = instances("p", windows=(0, 6)).produce(), instances("d").consume()
    source, _ = producer.fill("r", 30)
    consumer.consumers[0].start("r", source, consumer.take(30), 0, 30)
    ((outcome,),) = consumer.wait()
    assert outcome.kind == "mismatch"
    assert "give both instances --disable-hybrid-kv-cache-manager or neither" in outcome.cause


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
            taken = consumer.take(17)
            consumer.consumers[0].start("t", source, taken, 0, 17)
            assert isinstance(consumer.wait()[0][0], Done)
            assert consumer.holds("t", taken, 0, 17)


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


def test_expired_lease(instances: Callable) -> None:
    def wait(producer: object, consumer: object) -> Source:
        source, _ = producer.fill("old", 17, seconds=0.05)  # type: ignore[attr-defined]
        sleep(0.1)
        assert producer.all_free("old")  # type: ignore[attr-defined]
        return source

    outcome, _ = fails(instances, wait)
    assert outcome.kind == "lease"
    assert "the lease of 0.05 s has expired" in outcome.cause


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
        instances("p", lease=0.3, expose_cache=False).produce(),
        instances("d").consume(),
    )
    network.faults.delay, network.faults.seconds = 1.0, 0.1
    source, _ = producer.fill("r", 30)
    blocks = consumer.take(30)
    consumer.consumers[0].start("r", source, blocks, 0, 30)
    until = monotonic() + 0.8
    while monotonic() < until and not (ended := consumer.consumers[0].get_finished()):
        assert producer.producers[0].leases.pop_ended() == {}
        sleep(0.01)
    ended = ended or consumer.wait()[0]
    assert isinstance(ended[0], Done)
    assert ended[0].seconds > 0.3


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


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"total_heads": 2}, "int16 with 4 heads, this one int16 with 2"),
        ({"layers": 3}, "layers.2"),
    ],
)
def test_mismatched_caches_are_refused(other: dict, cause: str, instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d", **other).consume()
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    ((failed,),) = consumer.wait()
    assert failed.kind == "mismatch"
    assert cause in failed.cause


def test_mismatched_model_and_engine_are_refused(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d").consume(model="n")
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    ((failed,),) = consumer.wait()
    assert "the peer serves m by memory, this instance n" in failed.cause
    consumer.consumers[0].start("r", source._replace(engine="q"), consumer.take(8), 0, 8)
    ((failed,),) = consumer.wait()
    assert failed.kind == "peer"
    assert "engine p listens at this address instead of engine q" in failed.cause


def test_rotated_keys_in_another_order_are_refused(instances: Callable) -> None:
    """Their KV caches have the same shapes; the model's own order is not named, so that older
    instances are compatible."""
    model = SimpleNamespace(hf_config=PretrainedConfig(architectures=["M"]))
    on = {"ascend": {"platform": {"mla_prolog": True}}}
    configs = [SimpleNamespace(model_config=model, additional_config=given) for given in ({}, on)]
    pairs, halves = map(model_fingerprint, configs)
    assert halves == f"{pairs}/rope in halves"
    producer, consumer = instances("p").produce(model=pairs), instances("d").consume(model=halves)
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    ((failed,),) = consumer.wait()
    assert (failed.kind, failed.cause) == (
        "mismatch",
        f"the peer serves {pairs} by memory, this instance {halves} by memory",
    )


def test_other_weights_of_the_same_model_are_refused(instances: Callable) -> None:
    """For an instance without the checkpoint's files, whose fingerprint is unknown, only the model
    is compared."""
    for theirs, ours, cause in (
        ("new", "old", "the peer's weights of m have fingerprint new, this instance's old"),
        ("new", "new", ""),
        ("", "old", ""),
    ):
        producer, consumer = (
            instances("p", weights=theirs).produce(),
            instances("d", weights=ours).consume(),
        )
        source, _ = producer.fill("r", 8)
        consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
        ((outcome,),) = consumer.wait()
        assert (
            (outcome.kind, outcome.cause) == ("mismatch", cause)
            if cause
            else isinstance(outcome, Done)
        )


def test_fetch_outside_the_lease_is_refused(instances: Callable) -> None:
    producer = instances("p").produce()
    producer.fill("r", 8)
    rank = producer.producers[0]
    good = {
        "request": "r",
        "reader": "x",
        "rank": 0,
        "transfer": "n",
        "start": 0,
        "stop": 2,
        "regions": [0],
        "first_head": 0,
        "heads": 1,
    }
    assert not isinstance(rank.answer(Fetch(**good)), Refused)
    bad_ones = [
        {"stop": 9},
        {"start": -1},
        {"start": 2},
        {"regions": [4]},
        {"regions": [-1]},
        {"regions": []},
    ]
    bad_ones += [{"heads": 5}, {"first_head": 4}, {"heads": 0}]
    for bad in bad_ones:
        with pytest.raises(Exception, match="invalid fetch"):
            rank.answer(Fetch(**(good | bad)))


def test_malformed_messages_are_refused(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d").consume()
    server, draw = producer.producers[0].server, random.Random(0)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://{server.host}:{server.port}")
    for _ in range(200):
        socket.send_multipart(
            [draw.randbytes(draw.randrange(60)) for _ in range(draw.randrange(1, 5))]
        )
    socket.send_multipart([b"1", b"\x81\xa4type\xa9Handshake"])
    assert socket.poll(2000)
    assert isinstance(CODEC.decode_reply(socket.recv_multipart()[-1]), Refused)
    context.destroy(linger=0)
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    assert isinstance(consumer.wait()[0][0], Done)
