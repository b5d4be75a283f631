# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Layer-by-layer transfers during prefill, over the in-memory transport."""

import asyncio
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import pytest
import zmq
from aiohttp import web
from ascend_kv_connector.p2p.producer.leases import Leases, NotReadyError, PrefillProgress
from ascend_kv_connector.p2p.producer.prefill_notifier import PrefillNotifier
from ascend_kv_connector.p2p.protocol import Ack, PrefillCancelled, PrefillStarted, Refused
from ascend_kv_connector.p2p.scheduler import metaserver
from ascend_kv_connector.p2p.scheduler.metaserver import MetaserverClient, external_request_id
from ascend_kv_connector.p2p.transfers import Done
from ascend_transfer.errors import TransferError
from harness.kv.memory_transport import InMemoryNetwork
from harness.kv.prompts import LAYERS, Prompt, wait_for


@pytest.mark.parametrize(
    ("one", "other"),
    [({}, {}), ({"tp": 2}, {}), ({}, {"tp": 2}), ({"block_size": 8}, {"pp": 2})],
    ids=["1 to 1", "2 to 1", "1 to 2", "to a pipeline"],
)
@pytest.mark.parametrize("announced", ["before", "after"])
def test_layers_are_transferred_during_prefill(
    one: dict, other: dict, announced: str, instances: Callable
) -> None:
    producer, consumer = (
        instances("p", **one).produce(),
        instances("d", verify=True, **other).consume(),
    )
    prompt = Prompt(producer, "r", 40)
    blocks = consumer.take(36)
    if announced == "before":
        prompt.announce(consumer)
    for rank in consumer.consumers:
        rank.start("r", None, blocks, 4, 40)
    if announced == "after":
        prompt.announce(consumer)
    transfers = [rank._transfers["r"] for rank in consumer.consumers]
    layer = (
        sum(
            cache.token_bytes(range(len(cache.regions)), cache.heads.num)
            for cache in consumer.caches
        )
        // 2
    )
    arrived = 0
    for tokens, computed, new in ((17, LAYERS[0], 13), (17, LAYERS[1], 13), (40, LAYERS[0], 23)):
        prompt.compute(tokens, computed)
        arrived += new * layer
        assert wait_for(
            lambda wanted=arrived: sum(transfer.size for transfer in transfers) == wanted
        )
        assert any(rank._transfers for rank in consumer.consumers)
    prompt.compute(40, LAYERS[1])
    assert all(isinstance(outcome, Done) for (outcome,) in consumer.wait())
    assert consumer.holds("r", blocks, 4, 40)
    # The readers finish before the request, which owns its blocks until then.
    assert all(rank.leases.pop_ended() == {} for rank in producer.producers)
    prompt.finish()
    assert producer.all_free("r-far")


def part_of_a_prompt(instances: Callable) -> tuple[Any, Any, list[int]]:
    """Both instances and the reader's blocks, once 8 of a prompt's 20 tokens were transferred."""
    producer, consumer = instances("p", expose_cache=False).produce(), instances("d").consume()
    prompt = Prompt(producer, "r", 20)
    blocks = consumer.take(20)
    consumer.consumers[0].start("r", None, blocks, 0, 20)
    prompt.announce(consumer)
    prompt.compute(8)
    transfer, token = (
        consumer.consumers[0]._transfers["r"],
        consumer.caches[0].token_bytes(range(4), 4),
    )
    assert wait_for(lambda: transfer.size == 8 * token)
    return producer, consumer, blocks


def test_preempted_prompt_continues_in_new_blocks(instances: Callable) -> None:
    producer, consumer, blocks = part_of_a_prompt(instances)
    producer.producers[0].leases.revoke("r-far")
    for cache in producer.caches[0].caches:
        cache.fill_(-7)
    sleep(0.05)
    again = Prompt(producer, "r", 20)
    again.compute(20)
    assert isinstance(consumer.wait()[0][0], Done)
    assert consumer.holds("r", blocks, 0, 20)


def test_what_is_read_of_revoked_blocks_does_not_count() -> None:
    leases = Leases()
    leases.track("r", [1], 4, PrefillProgress())
    with leases.use("r", "d") as lease:
        lease.raise_if_revoked()
        leases.revoke("r")
        leases.track("r", [2], 4, PrefillProgress())
        with pytest.raises(NotReadyError):
            lease.raise_if_revoked()
    with leases.use("r", "d") as lease:
        lease.raise_if_revoked()
        assert lease.blocks == [2]
    leases.revoke("r", "it is over")
    with pytest.raises(TransferError, match="it is over"), leases.use("r", "d"):
        pass
    assert leases.pop_ended() == {}  # revoked blocks belong to the scheduler


def test_aborted_prefill_fails_the_transfer_at_once(instances: Callable) -> None:
    producer, consumer, blocks = part_of_a_prompt(instances)
    producer.producers[0].leases.revoke("r-far", "the request has ended there")
    ((failed,),) = consumer.wait()
    assert (failed.kind, failed.blocks) == ("lease", tuple(blocks[2:]))
    assert "the request has ended there" in failed.cause
    assert consumer.holds("r", blocks, 0, 8)


def test_transfer_without_a_producer_times_out(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d", transfer_timeout=0.2).consume()
    rank, blocks = consumer.consumers[0], consumer.take(8)
    rank.start("r", None, blocks, 0, 8)
    ((failed,),) = consumer.wait()
    assert (failed.kind, failed.blocks) == ("peer", tuple(blocks))
    assert "no prefill instance started the prompt in 0.2 s" in str(failed)
    prompt = Prompt(producer, "r", 8)
    prompt.announce(consumer)  # too late: its blocks are released
    assert wait_for(lambda: bool(producer.producers[0].leases._live["r-far"].readers))
    prompt.finish()
    assert producer.all_free("r-far")


def test_rejected_prefill_request_fails_the_transfer(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d").consume()
    rank = consumer.consumers[0]
    rank.start("r", None, consumer.take(8), 0, 8)
    rank.cancel_unstarted("r", "the router answers 503")
    ((failed,),) = consumer.wait()
    assert (failed.kind, failed.cause) == ("peer", "the router answers 503")
    prompt = Prompt(producer, "s", 8)
    blocks = consumer.take(8)
    rank.start("t", None, consumer.take(8), 0, 8)
    rank.answer(PrefillCancelled("t", "it has ended"))
    ((failed,),) = consumer.wait()
    assert (failed.kind, failed.cause) == (
        "peer",
        "the prefill instance cancelled it: it has ended",
    )
    rank.answer(PrefillCancelled("u", "it was too long"))  # before the request is scheduled
    rank.start("u", None, consumer.take(8), 0, 8)
    ((failed,),) = consumer.wait()
    assert (failed.kind, failed.cause) == (
        "peer",
        "the prefill instance cancelled it: it was too long",
    )
    rank.start("s", None, blocks, 0, 8)
    prompt.announce(consumer)
    rank.cancel_unstarted("s", "the router answers 503")  # although an instance runs the prefill
    prompt.compute(8)
    assert isinstance(consumer.wait()[0][0], Done)


@pytest.mark.parametrize("exposed", [True, False])
def test_cancelled_load_does_not_write_blocks(
    exposed: bool, instances: Callable, network: InMemoryNetwork
) -> None:
    producer = instances("p", expose_cache=exposed).produce()
    consumer = instances("d", lanes=1, expose_cache=False, transfer_timeout=60.0).consume()
    network.faults.hang = 1.0
    source, _ = producer.fill("r", 8)
    blocks = consumer.take(8)
    consumer.consumers[0].start("r", source, blocks, 0, 8)
    assert wait_for(lambda: bool(network.faults.counts))
    consumer.consumers[0].cancel("r", TransferError("aborted", "the request has ended"))
    ((failed,),) = consumer.wait()  # although the read is in progress
    assert failed.kind == "aborted"
    assert producer.all_free("r")
    network.faults.hung.set()
    sleep(0.3)
    assert all(bool((cache == -1).all()) for cache in consumer.caches[0].caches)


def test_notification_reaches_all_ranks(instances: Callable) -> None:
    consumer = instances("d", tp=2).consume()
    producer = instances("p").produce()
    prompt = Prompt(producer, "r", 8)
    blocks = consumer.take(8)
    for rank in consumer.consumers:
        rank.start("r", None, blocks, 0, 8)
    notifier = PrefillNotifier(1.0)
    notifier.notify((("127.0.0.1", 1),), prompt.announcement())  # nothing listens there
    notifier.notify(
        tuple((rank.server.host, rank.server.port) for rank in consumer.consumers),
        prompt.announcement(),
    )
    prompt.compute(8)
    assert all(isinstance(outcome, Done) for (outcome,) in consumer.wait())
    notifier.close()


def test_notification_of_a_rank_that_did_not_reply_is_repeated(instances: Callable) -> None:
    """And instances that do not reply at all delay no others."""
    with zmq.Context() as context:
        silent = [context.socket(zmq.ROUTER) for _ in range(8)]
        ranks = tuple(
            ("127.0.0.1", socket.bind_to_random_port("tcp://127.0.0.1")) for socket in silent
        )
        message, notifier = PrefillStarted("r", "p", "r", [("127.0.0.1", 1)]), PrefillNotifier(2.0)
        for rank in ranks:
            notifier.notify((rank,), message)
        notifier.notify(ranks, message)
        consumer, began = instances("d").consume(), monotonic()
        notifier.notify(
            ((consumer.consumers[0].server.host, consumer.consumers[0].server.port),), message
        )
        while "r" not in consumer.consumers[0]._early._kept and monotonic() < began + 20.0:
            sleep(0.01)
        assert monotonic() - began < 10.0
        seen = 0
        # The first attempts of two notifications, and one repetition.
        while seen < 3 and silent[0].poll(20_000):
            silent[0].recv_multipart()
            seen += 1
        assert seen == 3
        notifier.close()
        context.destroy(linger=0)


def test_announced_prompts_are_kept_or_not_acknowledged(instances: Callable) -> None:
    """As many as there are blocks, of which each request has one."""
    rank = instances("d", blocks=400).consume().consumers[0]

    def announce(number: int) -> Ack | Refused:
        return rank.answer(PrefillStarted(f"r{number}", "p", f"p{number}", [("127.0.0.1", 1)]))

    assert [announce(number) for number in range(400)] == [Ack()] * 400
    refused = announce(400)
    assert (type(refused), refused.again) == (Refused, True)
    assert rank.answer(PrefillCancelled("r401", "gone")).again
    for number in (0, 399):
        rank.start(f"r{number}", None, [3], 0, 4)
        assert rank._transfers[f"r{number}"].source.request == f"p{number}"
    assert announce(400) == Ack()
    assert rank.answer(PrefillCancelled("r401", "gone")) == Ack()
    rank.start("r401", None, [4], 0, 4)
    (failed,) = [each for each in rank.get_finished() if each.request == "r401"]
    assert failed.cause == "the prefill instance cancelled it: gone"


def test_metaserver_client_posts_and_reports_failures() -> None:
    asked: list[dict] = []
    failed: dict[str, str] = {}

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.Response(status=200 if len(asked) == 1 else 404, text="not here")

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/meet", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        client = MetaserverClient(5.0, failed.__setitem__)
        client.post("a", f"http://127.0.0.1:{port}/meet", {"request_id": "a"})
        while not asked:
            await asyncio.sleep(0.01)
        client.post("b", f"http://127.0.0.1:{port}/meet", {"request_id": "b"})
        client.post("c", "http://127.0.0.1:1/meet", {})
        client.post("d", "no address", {})
        until = monotonic() + 5
        while len(failed) < 3 and monotonic() < until:
            await asyncio.sleep(0.01)
        client.close()
        await runner.cleanup()

    asyncio.run(run())
    assert [each["request_id"] for each in asked] == ["a", "b"]
    assert set(failed) == {"b", "c", "d"}
    assert "replied 404: not here" in failed["b"]


def test_metaserver_client_limits_redirects_and_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer may contain a client's text, and a redirect may name any address."""
    failed: dict[str, str] = {}
    asked, open_now, max_open = list[str](), 0, 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal open_now, max_open
        asked.append(request.path)
        open_now, max_open = open_now + 1, max(max_open, open_now + 1)
        await asyncio.sleep(0.1)
        open_now -= 1
        if request.path == "/redirect":
            return web.Response(status=307, headers={"Location": "/elsewhere"})
        return web.Response(status=500, body=b"a\nERROR forged line \x1b[31m" + b"x" * 1_000_000)

    async def run() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{any}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setattr(metaserver, "most_connections", lambda: 2)
        client = MetaserverClient(60.0, failed.__setitem__)
        for name in ("redirect", *"abcde"):
            client.post(
                name, f"http://127.0.0.1:{runner.addresses[0][1]}/{name}", {"request_id": name}
            )
        until = monotonic() + 60
        while len(failed) < 6 and monotonic() < until:
            await asyncio.sleep(0.01)
        client.close()
        await runner.cleanup()

    asyncio.run(run())
    assert sorted(asked) == sorted(f"/{name}" for name in ("redirect", *"abcde"))
    assert "replied 307" in failed["redirect"]
    assert "replied 500: a?ERROR forged line ?[31mxxx" in failed["a"]
    assert all(len(cause) < 400 and cause.isprintable() for cause in failed.values())
    assert max_open == 2


def test_metaserver_client_reads_no_endless_answer() -> None:
    failed: dict[str, str] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        endless = web.StreamResponse(status=500)
        await endless.prepare(request)
        while True:
            await endless.write(b"x" * 65536)

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/meet", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = MetaserverClient(5.0, failed.__setitem__)
        client.post("a", f"http://127.0.0.1:{runner.addresses[0][1]}/meet", {})
        while not failed:
            await asyncio.sleep(0.01)
        client.close()
        await runner.cleanup()

    asyncio.run(run())
    assert failed["a"].endswith(f"replied 500: {'x' * metaserver.ANSWER_BYTES}")


def test_external_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", raising=False)
    assert external_request_id("cmpl-7-0-1a2b3c4d") == "cmpl-7-0"
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert external_request_id("cmpl-7-0") == "cmpl-7-0"
