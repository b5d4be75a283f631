# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Writes of a prompt into the decode instance's blocks during its prefill, over the in-memory
transport."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from ascend_kv_connector.p2p.producer import pusher
from ascend_kv_connector.p2p.producer.producer import Producer
from ascend_kv_connector.p2p.producer.pusher import Job, PushJobs
from ascend_kv_connector.p2p.protocol import Owner, Push, Pushed, Refused
from ascend_kv_connector.p2p.transfers import Done
from ascend_transfer.errors import TransferError
from ascend_transfer.query_queue import BusyError
from harness.kv.prompts import LAYERS, Prompt, wait_for

LAYOUTS: dict[str, tuple[dict, dict]] = {
    "1 to 1": ({}, {}),
    "2 to 2": ({"tp": 2}, {"tp": 2}),
    "pipeline of 2 to 1": ({"pp": 2}, {}),
    "other block size, to a pipeline": (
        {"block_size": 8},
        {"block_size": 2, "blocks": 128, "pp": 2},
    ),
    "latents": (
        {"sizes": {"latent": 512, "rope": 64}, "total_heads": 1},
        {"sizes": {"latent": 512, "rope": 64}, "total_heads": 1},
    ),
}


def started(
    instances: Callable, one: dict | None = None, other: dict | None = None, tokens: int = 40
) -> tuple[Any, Any, Prompt, list[int]]:
    """Both instances, a prompt that the first begins to compute, and the blocks into which the
    other loads it from token 4 on."""
    producer, consumer = (
        instances("p", **one or {}).produce(),
        instances("d", **other or {}).consume(),
    )
    prompt = Prompt(producer, "r", tokens)
    blocks = consumer.take(tokens - 4)
    for rank in consumer.consumers:
        rank.start("r", None, blocks, 4, tokens)
    prompt.announce(consumer)
    return producer, consumer, prompt, blocks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_are_written_as_they_are_computed(layout: str, instances: Callable) -> None:
    """Without copies on either side, and with a message a rank."""
    one, other = LAYOUTS[layout]
    # after which it is renewed
    producer, consumer, prompt, blocks = started(instances, one, other | {"answer_timeout": 60.0})
    places = [list(consumer.places("r", blocks, 4, stop)) for stop in (17, 40)]
    regions = [region for cache in consumer.caches for region in cache.regions]
    for stop, layer in ((17, LAYERS[0]), (17, LAYERS[1]), (40, LAYERS[0])):
        prompt.compute(stop, layer)
        for region, (cache, rows, expected) in zip(regions, places[stop == 40], strict=True):
            if region.layer == layer:
                assert wait_for(
                    lambda cache=cache, rows=rows, expected=expected: torch.equal(
                        cache[rows], expected
                    )
                ), (
                    stop,
                    layer,
                )
        # A pipeline's first rank may have all of its layers.
        assert not consumer.consumers[-1].get_finished()
    prompt.compute(40, LAYERS[1])
    outcomes = [outcome for (outcome,) in consumer.wait()]
    assert all(isinstance(outcome, Done) for outcome in outcomes), outcomes
    assert consumer.holds("r", blocks, 4, 40)
    assert all(rank.pop_settled() == {"r"} for rank in consumer.consumers)
    size = sum(outcome.size for outcome in outcomes)
    assert sum(rank.sent_bytes for rank in producer.producers) == size
    assert (
        sum(rank.copied_bytes for rank in producer.producers),
        sum(outcome.copied for outcome in outcomes),
    ) == (0, 0)
    # A handshake with each, and a Push to those that have blocks.
    producers = len(producer.producers)
    assert all(producers < outcome.messages <= 2 * producers for outcome in outcomes)
    prompt.finish()
    assert producer.all_free("r-far")


def test_waiting_pushes_leave_the_interpreter_to_the_engine(
    instances: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a thread, and its reader's query waits in the server, while the engine launches
    other prompts."""
    looks = Counter[str]()

    def count(cls: type, name: str) -> None:
        method = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *given: looks.update([name]) or method(*given))

    count(Producer, "use_lease")
    count(PushJobs, "answer")
    _, consumer, prompt, _ = started(instances, other={"answer_timeout": 60.0})
    assert wait_for(lambda: looks["use_lease"] > 3)
    looks.clear()
    sleep(1.0)
    assert 0 < looks["use_lease"] < 100  # Every 2 ms there would be 500.
    assert 0 < looks["answer"] < 50  # Every 5 ms there would be 200.
    prompt.compute(40)
    assert isinstance(consumer.wait()[0][0], Done)


def test_preempted_prompt_continues_in_other_blocks(instances: Callable) -> None:
    producer, consumer, prompt, blocks = started(instances)
    prompt.compute(17)
    (cache, rows, expected), *_ = consumer.places("r", blocks, 4, 17)
    assert wait_for(lambda: torch.equal(cache[rows], expected))
    producer.producers[0].leases.revoke("r-far")
    for each in producer.caches[0].caches:
        each.fill_(-7)
    again = Prompt(producer, "r", 40)
    again.compute(9)
    again.compute(40)
    assert isinstance(consumer.wait()[0][0], Done)
    assert consumer.holds("r", blocks, 4, 40)


def test_aborted_prefill_fails_the_transfer(instances: Callable) -> None:
    producer, consumer, prompt, blocks = started(instances)
    prompt.compute(17)
    producer.producers[0].leases.revoke("r-far", "the request ended before its prefill")
    ((outcome,),) = consumer.wait()
    assert (outcome.kind, outcome.blocks) == ("lease", tuple(blocks))
    assert wait_for(
        lambda: not consumer.consumers[0].pop_settled() and not consumer.consumers[0]._unsettled
    )


def test_cancelled_request_stops_the_writes_at_once(instances: Callable) -> None:
    """The producer confirms it, so that the blocks are free at once."""
    _, consumer, prompt, blocks = started(instances)
    rank, settled = consumer.consumers[0], set[str]()
    prompt.compute(17)
    (cache, rows, expected), *_ = consumer.places("r", blocks, 4, 17)
    assert wait_for(lambda: torch.equal(cache[rows], expected))
    rank.cancel("r", TransferError("aborted", "the request has ended"))
    until = monotonic() + 20
    while not settled and monotonic() < until:
        rank.get_finished()
        settled = rank.pop_settled()
        sleep(0.005)
    assert settled == {"r"}
    for each in consumer.caches[0].caches:
        each.fill_(-3)
    prompt.compute(40)
    sleep(0.2)
    assert all(bool((each == -3).all()) for each in consumer.caches[0].caches)


def test_push_for_a_reader_that_is_gone_ends(instances: Callable) -> None:
    producer, consumer, _, _ = started(instances, {"answer_timeout": 0.3})
    rank = producer.producers[0]
    assert wait_for(lambda: bool(rank._pushes._jobs))
    (job,) = rank._pushes._jobs.values()
    for each in consumer.consumers:
        each.close()
    assert wait_for(lambda: job.reply is not None, 20.0)
    assert (job.reply.kind, job.reply.cause) == (
        "aborted",
        "the reader has cancelled it, or is gone",
    )


GOOD: dict[str, Any] = {
    "request": "r",
    "reader": "x",
    "rank": 0,
    "transfer": "n",
    "start": 0,
    "stop": 8,
    "regions": [0],
    "session": "s",
    "memory": [(0, 16)],
    "block_tokens": 4,
    "block_size": 4,
    "blocks": [1, 2],
}


@pytest.mark.parametrize("uptime", [100.0, 1e6])
def test_only_some_ended_pushes_are_remembered(
    uptime: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine that has just started, whose monotonic clock is near 0."""
    monkeypatch.setattr(pusher, "monotonic", lambda: uptime)
    monkeypatch.setattr(pusher, "MAX_ENDED", 10)
    jobs: list[Job] = []
    pushes = PushJobs(jobs.append)
    for number in range(30):
        push = Push(**GOOD | {"transfer": f"n{number}"})
        with pytest.raises(BusyError):
            pushes.answer(push.owner, push)
        jobs[-1].reply = Pushed(0)
    assert len(pushes._jobs) == 11


def test_push_without_a_thread_can_be_stopped() -> None:
    push = Push(**GOOD)
    started: list[Any] = []
    jobs, owner = PushJobs(started.append), Owner("r", "x", 0, "n")
    with pytest.raises(BusyError):
        jobs.answer(owner, push)
    jobs.stop(owner)
    assert not jobs.begin(started[0])
    with pytest.raises(BusyError):
        jobs.answer(owner, push)
    assert jobs.begin(started[1])
    with pytest.raises(BusyError):
        jobs.stop(owner)


def test_push_does_not_get_an_earlier_ones_reply() -> None:
    jobs: list[Job] = []
    pushes = PushJobs(jobs.append)
    first, second = Push(**GOOD), Push(**GOOD | {"blocks": [3, 4]})

    def is_busy(push: Push) -> bool:
        try:
            pushes.answer(push.owner, push)
        except BusyError:
            return True
        return False

    assert is_busy(first)
    assert pushes.begin(jobs[0])
    assert is_busy(second)
    assert (len(jobs), jobs[0].cancelled) == (1, True)
    jobs[0].reply = Pushed(5)
    assert is_busy(second)
    assert [job.push for job in jobs] == [first, second]
    jobs[1].reply = Pushed(7)
    assert pushes.answer(second.owner, second) == Pushed(7)


def test_invalid_pushes_are_refused(instances: Callable) -> None:
    rank = instances("p").produce().producers[0]
    twice = {"regions": [0, 0], "memory": [(0, 16), (0, 16)]}
    for bad in (
        {"stop": 0},
        {"start": -1},
        {"regions": [4]},
        {"regions": []},
        {"memory": []},
        {"blocks": [1]},
        twice,
    ):
        assert isinstance(rank.answer(Push(**(GOOD | bad))), Refused), bad
    rank.rank = replace(rank.rank, trusts=lambda host: host == "10.0.0.1")
    for session in ("10.0.0.2:15000/ab", "10.0.0.2", ":1"):
        answer = rank.answer(Push(**(GOOD | {"session": session})))
        assert (
            answer.cause
            == "the prefill instance's option peers does not have this decode instance's host"
        )
    hidden = instances("q", expose_cache=False).produce().producers[0]
    assert isinstance(hidden.answer(Push(**GOOD)), Refused)
