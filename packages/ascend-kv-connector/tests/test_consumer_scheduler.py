# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scheduler side of a consumer with vLLM's requests: loads, releases and renewals."""

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p import trusted_addresses
from ascend_kv_connector.p2p.params import TransferParams
from ascend_kv_connector.p2p.protocol import VERSION
from ascend_kv_connector.p2p.scheduler.cache_groups import CacheGroups
from ascend_kv_connector.p2p.scheduler.metadata import Load
from ascend_kv_connector.p2p.scheduler.producer import prompt_digest
from ascend_kv_connector.p2p.scheduler.scheduler import P2PScheduler
from ascend_kv_connector.p2p.transfers import Source
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses
from harness.kv.scheduling import (
    ANSWER,
    NOTHING,
    SOURCE,
    blocks,
    load,
    of_windows,
    request,
    scheduler,
)
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.request import Request, RequestStatus


def test_remote_prompt_is_loaded_after_the_local_prefix() -> None:
    consumer, near = scheduler(), request(params=dict(ANSWER))
    assert consumer.get_num_new_matched_tokens(near, 8) == (13, True)
    assert consumer.get_num_new_matched_tokens(near, 8) == (13, True)
    consumer.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55, 56), 13)
    # vLLM calls it again after the load.
    consumer.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55, 56), 0)
    meta = consumer.build_connector_meta(NOTHING)
    assert meta.loads == {"near": Load(SOURCE, [52, 53, 54, 55], 8, 21)}
    assert meta.released == []
    assert consumer.build_connector_meta(NOTHING).loads == {}
    assert consumer.get_num_new_matched_tokens(near, 0) == (0, False)  # after a preemption
    assert consumer.request_finished(near, [50]) == (False, None)


def test_last_token_is_not_loaded_with_sliding_windows() -> None:
    consumer, near = of_windows(), request(params=dict(ANSWER))
    assert consumer.get_num_new_matched_tokens(near, 8) == (12, True)
    tables = SimpleNamespace(
        get_block_ids=lambda: ([50, 51, 52, 53, 54, 55], [0, 0, 0, 63, 64, 65])
    )
    consumer.update_state_after_alloc(near, tables, 12)
    assert consumer.build_connector_meta(NOTHING).loads == {
        "near": Load(SOURCE, [52, 53, 54, 0, 63, 64], 8, 20)
    }
    one = request(1, params=dict(ANSWER, remote_num_tokens=1, remote_request_id="one"))
    consumer.on_new_request(one)
    assert consumer.get_num_new_matched_tokens(one, 0) == (0, False)
    consumer.update_state_after_alloc(one, blocks(7), 0)
    assert consumer.build_connector_meta(NOTHING).released == [SOURCE._replace(request="one")]


def test_fully_cached_prompt_is_declined() -> None:
    consumer, near = scheduler(), request(20, params=dict(ANSWER, remote_num_tokens=16))
    assert consumer.get_num_new_matched_tokens(near, 16) == (0, False)
    consumer.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54), 0)
    assert consumer.build_connector_meta(NOTHING).released == [SOURCE]


def test_ids_that_no_message_can_have_are_declined(caplog: pytest.LogCaptureFixture) -> None:
    """Before blocks are allocated; vLLM takes ids of any length from clients, with any characters."""
    consumer, name = scheduler(), "x\nERROR forged \x1b[31m" + "y" * 3000
    for params in (ANSWER, {"do_remote_prefill": True, "metaserver": "http://own"}):
        near = request(params=dict(params), name=name)
        assert consumer.get_num_new_matched_tokens(near, 0) == (0, False)
        consumer.update_state_after_alloc(near, blocks(7), 0)
        consumer.request_finished(near, [7])
    remote = request(params={"do_remote_decode": True}, name=name)
    remote.status, remote.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 21
    assert consumer.request_finished(remote, [7, 8]) == (False, None)
    reader = {"remote_reader": "r", "remote_ranks": [["h", 1]], "do_remote_decode": True}
    reader["remote_prompt_digest"] = prompt_digest(request(), 21)
    waited = request(params=reader, name=name)
    consumer.update_state_after_alloc(waited, blocks(7, 8), 0)
    meta = consumer.build_connector_meta(NOTHING)
    assert (meta.loads, meta.leases, meta.layerwise) == ({}, {}, {})
    ((prefill, cause),) = meta.cancelled
    assert prefill.reader == "r"
    assert cause == "its request has a request id of 3020 characters; the most is 512"
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == 4
    assert all("request id of 3020 characters" in line for line in lines)
    assert all("x?ERROR forged ?[31m" in line and len(line) < 600 for line in lines)


def test_a_request_that_vllm_refuses_releases_its_source(caplog: pytest.LogCaptureFixture) -> None:
    """A client's error, or a disconnection: vLLM submits a request with these parameters and another
    prompt, and aborts it at once."""
    if not hasattr(AsyncLLM, "notify_kv_transfer_request_rejected"):
        pytest.skip("this vLLM does not tell connectors")
    submitted: list[EngineCoreRequest] = []

    async def add(each: EngineCoreRequest) -> None:
        submitted.append(each)

    client: Any = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=add))
    for name in ("refused", "again"):
        params = request(params=dict(ANSWER)).kv_transfer_params
        asyncio.run(AsyncLLM.notify_kv_transfer_request_rejected(client, name, params))
    consumer, released = scheduler(), []
    for each in submitted:
        refused = Request.from_engine_core_request(each, None)
        consumer.on_new_request(refused)
        refused.status = RequestStatus.FINISHED_ABORTED
        assert consumer.request_finished(refused, []) == (False, None)
        released.append(consumer.build_connector_meta(NOTHING).released)
    assert released == [[SOURCE], []]
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_lease_is_renewed_while_a_request_waits_or_loads() -> None:
    now = [100.0]
    trusted = TrustedAddresses(insecure=True)
    consumer = P2PScheduler(
        "d", CacheGroups(4), True, True, Options(), trusted, clock=lambda: now[0]
    )
    near = request(params=dict(ANSWER, remote_lease=30.0))
    consumer.on_new_request(near)

    def renewed(seconds: float) -> list[Source]:
        now[0] += seconds
        return consumer.build_connector_meta(NOTHING).renewed

    assert [renewed(9.0), renewed(2.0), renewed(9.0), renewed(2.0)] == [[], [SOURCE], [], [SOURCE]]
    consumer.get_num_new_matched_tokens(near, 8)
    consumer.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55), 13)
    assert renewed(11.0) == [SOURCE]  # its transfer may wait, too
    consumer.update_finished_loads(["near"])
    assert renewed(50.0) == []
    for params in (
        dict(ANSWER, remote_request_id="far2"),
        dict(ANSWER, remote_num_tokens=20, remote_prompt_digest="other"),
    ):
        left = request(params=params, name="left")
        consumer.on_new_request(left)
        left.status = RequestStatus.FINISHED_ABORTED
        consumer.request_finished(left, [])
        assert renewed(50.0) == []


@pytest.mark.parametrize("produces", [True, False], ids=["both roles", "consumer"])
def test_instances_of_both_roles_do_not_deadlock(produces: bool) -> None:
    """Each may keep the blocks that the other one's requests wait for. An instance with one role
    waits until its requests end."""
    now = [100.0]
    options, trusted = Options(transfer_timeout=20.0), TrustedAddresses(insecure=True)
    consumer = P2PScheduler(
        "d", CacheGroups(4), produces, True, options, trusted, clock=lambda: now[0]
    )
    waits, loads = (
        request(params=dict(ANSWER, remote_request_id=name), name=name)
        for name in ("waits", "loads")
    )
    for each in (waits, loads):
        consumer.on_new_request(each)
        assert consumer.get_num_new_matched_tokens(each, 8) == (13, True)
    consumer.update_state_after_alloc(loads, blocks(50, 51, 52, 53, 54, 55), 13)
    now[0] += 20.0
    released = [source.request for source in consumer.build_connector_meta(NOTHING).released]
    assert released == (["waits"] if produces else [])
    assert consumer.get_num_new_matched_tokens(waits, 8) == ((0, False) if produces else (13, True))
    assert consumer.get_num_new_matched_tokens(waits, 8) == ((0, False) if produces else (13, True))


def test_signature_may_expire_while_a_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = TrustedAddresses(b"sixteen bytes or more")
    consumer = P2PScheduler("d", CacheGroups(4), True, True, Options(), trusted)
    answer = request(params=dict(ANSWER)).kv_transfer_params
    signed = trusted.sign(TransferParams.parse(answer)).to_dict()
    early, late = (request(params=dict(signed), name=name) for name in ("early", "late"))
    consumer.on_new_request(early)
    now = time.time()
    monkeypatch.setattr(trusted_addresses.time, "time", lambda: now + 901)
    consumer.on_new_request(late)
    assert consumer.get_num_new_matched_tokens(early, 8) == (13, True)
    assert consumer.get_num_new_matched_tokens(late, 8) == (0, False)


def test_source_with_another_protocol_version_is_not_loaded() -> None:
    consumer = scheduler()
    assert consumer.get_num_new_matched_tokens(
        request(params=dict(ANSWER, remote_protocol=VERSION)), 8
    ) == (13, True)
    assert consumer.get_num_new_matched_tokens(
        request(params=dict(ANSWER, remote_protocol=VERSION + 1), name="other"), 8
    ) == (0, False)


def test_request_aborted_before_scheduling_is_declined() -> None:
    consumer, near = scheduler(), request(params=dict(ANSWER))
    near.status = RequestStatus.FINISHED_ABORTED
    assert consumer.request_finished(near, []) == (False, None)
    assert consumer.build_connector_meta(NOTHING).released == [SOURCE]


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_engine_id": None},
        {"remote_num_tokens": "21"},
        {"remote_ranks": []},
        {"remote_ranks": [["10.0.0.1"]]},
        {"remote_ranks": [["10.0.0.1", "7000"]]},
        {"remote_ranks": "10.0.0.1:7000"},
        {"remote_ranks": [["10.0.0.1", 7000]] * 2000},
        {"metaserver": "http://169.254.169.254/latest"},
    ],
)
def test_invalid_params_are_logged_and_the_prompt_is_computed(
    wrong: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ascend_platform import extension

    messages: list[str] = []
    monkeypatch.setattr(
        extension.logger, "warning", lambda form, *values: messages.append(form % values)
    )
    consumer, near = scheduler(), request(params=ANSWER | wrong)
    assert consumer.get_num_new_matched_tokens(near, 0) == (0, False)
    assert consumer.get_num_new_matched_tokens(near, 0) == (0, False)
    (line,) = messages
    assert next(iter(wrong)) in line
    assert len(line) < 500


def test_push_mode_uses_the_configured_metaserver_by_default() -> None:
    decode, asked = scheduler(), []
    decode.consumer.client.post = lambda name, url, wanted: asked.append((name, url))
    plain, own_params = (
        request(params={"do_remote_prefill": True}),
        {"do_remote_prefill": True, "metaserver": "http://own"},
    )
    assert decode.get_num_new_matched_tokens(plain, 0) == (0, False)  # mode pull: computed here
    decode.consumer.metaserver = "http://configured"
    for name, params, source in (
        ("plain", {"do_remote_prefill": True}, None),
        ("own", own_params, None),
        ("pull", ANSWER, SOURCE),
    ):
        near = request(params=dict(params), name=name + "-12345678")
        assert decode.get_num_new_matched_tokens(near, 8) == (13, True)
        decode.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55), 13)
        assert decode.build_connector_meta(NOTHING).loads[near.request_id].source == source
    assert asked == [("plain-12345678", "http://configured"), ("own-12345678", "http://own")]
    prefill = scheduler()
    prefill.consumer.metaserver = "http://configured"
    # Without a waiting consumer it is kept for pull.
    remote = request(params={"do_remote_decode": True}, name="far")
    remote.status, remote.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 21
    assert prefill.request_finished(remote, [7, 8])[0]


def test_load_of_a_disconnected_client_is_aborted() -> None:
    consumer, near = scheduler(), request(params=dict(ANSWER))
    consumer.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55, 56), 21)
    near.status = RequestStatus.FINISHED_ABORTED
    assert consumer.request_finished(near, [50]) == (False, None)
    assert consumer.build_connector_meta(NOTHING).aborted == ["near"]
    consumer.update_state_after_alloc(
        second := request(params=dict(ANSWER), name="second"),
        blocks(50, 51, 52, 53, 54, 55, 56),
        21,
    )
    consumer.update_finished_loads({"second"})
    assert consumer.request_finished(second, [50]) == (False, None)
    assert consumer.build_connector_meta(NOTHING).aborted == []


def test_source_of_another_prompt_is_not_loaded() -> None:
    """vLLM returns the parameters of a list's first prompt, and routers give them to all prompts of
    the list."""
    consumer = scheduler()
    answer = request(params=dict(ANSWER)).kv_transfer_params
    prompts = {
        "first": request(params=dict(answer), name="first"),
        "second": request(params=dict(answer), name="second", first=7),
        "shorter": request(20, params=dict(answer), name="shorter"),
        "longer": request(30, params=dict(answer), name="longer"),
    }
    assert {name: load(consumer, near)[0] for name, near in prompts.items()} == {
        "first": 21,
        "second": 0,
        "shorter": 0,
        "longer": 21,
    }
    assert consumer.build_connector_meta(NOTHING).released == []


def test_requests_that_share_a_source_release_it_once() -> None:
    """With n > 1, or if a router repeats a request, several requests name one source."""
    consumer, answer = scheduler(), request(params=dict(ANSWER)).kv_transfer_params
    one, other, aborted, late = (
        request(params=dict(answer), name=name) for name in ("one", "other", "aborted", "late")
    )
    assert [load(consumer, each) for each in (one, other, aborted)] == [(21, [])] * 3
    consumer.update_finished_loads({"one"})
    aborted.status = RequestStatus.FINISHED_ABORTED
    consumer.request_finished(aborted, [])
    meta = consumer.build_connector_meta(NOTHING)
    assert (meta.released, meta.aborted) == ([], ["aborted"])
    consumer.update_finished_loads({"other", "aborted"})
    assert consumer.build_connector_meta(NOTHING).released == [SOURCE]
    assert load(consumer, late) == (0, [])  # the producer has freed it
