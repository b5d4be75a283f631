# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scheduler side with vLLM's requests: metadata for the workers, and parameters for the router."""

import inspect
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_kv_connector.config import Options
from ascend_kv_connector.connector import AscendP2PConnector
from ascend_kv_connector.p2p import trusted_addresses
from ascend_kv_connector.p2p.params import TransferParams
from ascend_kv_connector.p2p.prompt_digest import prompt_digest
from ascend_kv_connector.p2p.protocol import VERSION
from ascend_kv_connector.p2p.scheduler.cache_groups import CacheGroups
from ascend_kv_connector.p2p.scheduler.metadata import Endpoint, LayerwisePrefill, Load
from ascend_kv_connector.p2p.scheduler.scheduler import P2PScheduler
from ascend_kv_connector.p2p.transfers import Source
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

ANSWER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_request_id": "far",
    "remote_host": "10.0.0.1",
    "remote_port": 7000,
    "remote_ranks": [["10.0.0.1", 7000], ["10.0.0.2", 7001]],
    "remote_num_tokens": 21,
}
"""For the prompt of :func:`request`."""

SOURCE = Source("p", "far", (("10.0.0.1", 7000), ("10.0.0.2", 7001)))


NOTHING = SchedulerOutput.make_empty()


def request(
    tokens: int = 21,
    params: dict[str, Any] | None = None,
    name: str = "near",
    first: int = 0,
    **more: Any,
) -> Request:
    """Request for the prompt ``first``, 1, 2, …; a source in its parameters is for it, unless they
    have a digest."""
    sampling = SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": params} if params else None
    )
    ids = [first, *range(1, tokens)]
    made = Request(
        request_id=name, prompt_token_ids=ids, sampling_params=sampling, pooling_params=None, **more
    )
    if params and "remote_num_tokens" in params and isinstance(params["remote_num_tokens"], int):
        params.setdefault("remote_prompt_digest", prompt_digest(made, params["remote_num_tokens"]))
    return made


def scheduler(produces: bool = True, consumes: bool = True) -> P2PScheduler:
    urls = ["http://router/v1/metaserver", "http://configured", "http://own"]
    trusted = TrustedAddresses(metaservers=urls, insecure=True)
    made = P2PScheduler("d", CacheGroups(4), produces, consumes, Options(), trusted)
    made.set_endpoints(
        {(1, 0): Endpoint("h", 3, 23), (0, 1): Endpoint("h", 2, 22), (0, 0): Endpoint("h", 1, 21)}
    )
    return made


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def test_remote_prompt_is_loaded_after_the_local_prefix() -> None:
    made, near = scheduler(), request(params=dict(ANSWER))
    assert made.get_num_new_matched_tokens(near, 8) == (13, True)
    assert made.get_num_new_matched_tokens(near, 8) == (13, True)
    made.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55, 56), 13)
    # vLLM calls it again after the load.
    made.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55, 56), 0)
    meta = made.build_connector_meta(NOTHING)
    assert meta.loads == {"near": Load(SOURCE, [52, 53, 54, 55], 8, 21)}
    assert meta.released == []
    assert made.build_connector_meta(NOTHING).loads == {}
    assert made.get_num_new_matched_tokens(near, 0) == (0, False)  # after a preemption
    assert made.request_finished(near, [50]) == (False, None)


def of_windows() -> P2PScheduler:
    trusted = TrustedAddresses(metaservers=["http://r"], insecure=True)
    made = P2PScheduler("d", CacheGroups(4, (0, 6)), True, True, Options(), trusted)
    made.set_endpoints({(0, 0): Endpoint("h", 1, 21)})
    return made


def test_last_token_is_not_loaded_with_sliding_windows() -> None:
    made, near = of_windows(), request(params=dict(ANSWER))
    assert made.get_num_new_matched_tokens(near, 8) == (12, True)
    tables = SimpleNamespace(
        get_block_ids=lambda: ([50, 51, 52, 53, 54, 55], [0, 0, 0, 63, 64, 65])
    )
    made.update_state_after_alloc(near, tables, 12)
    assert made.build_connector_meta(NOTHING).loads == {
        "near": Load(SOURCE, [52, 53, 54, 0, 63, 64], 8, 20)
    }
    one = request(1, params=dict(ANSWER, remote_num_tokens=1, remote_request_id="one"))
    assert made.get_num_new_matched_tokens(one, 0) == (0, False)
    made.update_state_after_alloc(one, blocks(7), 0)
    assert made.build_connector_meta(NOTHING).released == [SOURCE._replace(request="one")]


@pytest.mark.parametrize(
    ("tokens", "kept"), [(4, True), (9, False), (10, True), (21, False), (22, True)]
)
def test_prompt_with_freed_window_blocks_is_not_offered(tokens: int, kept: bool) -> None:
    made, far = of_windows(), request(tokens, params={"do_remote_decode": True}, name="far")
    far.status, far.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, tokens
    count, gone = -(-tokens // 4), max(0, tokens + 1 - 6) // 4  # as vLLM's SlidingWindowManager
    tables = [*range(10, 10 + count), *[0] * gone, *range(50 + gone, 50 + count)]
    offered, params = made.request_finished(far, tables)
    assert (offered, params is not None) == (kept, kept)
    assert made.build_connector_meta(NOTHING).leases == ({"far": (tables, tokens)} if kept else {})


def test_layerwise_is_refused_with_sliding_windows() -> None:
    made, near = of_windows(), request(params={"do_remote_prefill": True, "metaserver": "http://r"})
    assert made.get_num_new_matched_tokens(near, 0) == (0, False)
    reader = {"do_remote_decode": True, "remote_reader": "d-1", "remote_ranks": [["h", 9]]}
    reader["remote_prompt_digest"] = prompt_digest(request(22), 22)
    far = request(22, params=reader, name="far")
    made.update_state_after_alloc(far, blocks(*range(1, 7)), 0)
    far.status, far.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 22
    made.request_finished(far, [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 7, 8])
    ((prefill, cause),) = made.build_connector_meta(NOTHING).cancelled
    assert prefill.reader == "d-1"
    assert "layer-by-layer transfers do not support" in cause


def test_fully_cached_prompt_is_declined() -> None:
    made, near = scheduler(), request(20, params=dict(ANSWER, remote_num_tokens=16))
    assert made.get_num_new_matched_tokens(near, 16) == (0, False)
    made.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54), 0)
    assert made.build_connector_meta(NOTHING).released == [SOURCE]


def test_lease_is_renewed_while_a_request_waits_or_loads() -> None:
    now = [100.0]
    trusted = TrustedAddresses(insecure=True)
    made = P2PScheduler("d", CacheGroups(4), True, True, Options(), trusted, clock=lambda: now[0])
    near = request(params=dict(ANSWER, remote_lease=30.0))
    made.on_new_request(near)

    def renewed(seconds: float) -> list[Source]:
        now[0] += seconds
        return made.build_connector_meta(NOTHING).renewed

    assert [renewed(9.0), renewed(2.0), renewed(9.0), renewed(2.0)] == [[], [SOURCE], [], [SOURCE]]
    made.get_num_new_matched_tokens(near, 8)
    made.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55), 13)
    assert renewed(11.0) == [SOURCE]  # its transfer may wait, too
    made.update_finished_loads(["near"])
    assert renewed(50.0) == []
    for params in (
        dict(ANSWER, remote_request_id="far2"),
        dict(ANSWER, remote_num_tokens=20, remote_prompt_digest="other"),
    ):
        left = request(params=params, name="left")
        made.on_new_request(left)
        left.status = RequestStatus.FINISHED_ABORTED
        made.request_finished(left, [])
        assert renewed(50.0) == []


@pytest.mark.parametrize("produces", [True, False], ids=["both roles", "consumer"])
def test_instances_of_both_roles_do_not_deadlock(produces: bool) -> None:
    """Each may keep the blocks that the other one's requests wait for. An instance with one role
    waits until its requests end."""
    now = [100.0]
    options, trusted = Options(transfer_timeout=20.0), TrustedAddresses(insecure=True)
    made = P2PScheduler("d", CacheGroups(4), produces, True, options, trusted, clock=lambda: now[0])
    waits, loads = (
        request(params=dict(ANSWER, remote_request_id=name), name=name)
        for name in ("waits", "loads")
    )
    for each in (waits, loads):
        made.on_new_request(each)
        assert made.get_num_new_matched_tokens(each, 8) == (13, True)
    made.update_state_after_alloc(loads, blocks(50, 51, 52, 53, 54, 55), 13)
    now[0] += 20.0
    released = [source.request for source in made.build_connector_meta(NOTHING).released]
    assert released == (["waits"] if produces else [])
    assert made.get_num_new_matched_tokens(waits, 8) == ((0, False) if produces else (13, True))
    assert made.get_num_new_matched_tokens(waits, 8) == ((0, False) if produces else (13, True))


def test_signature_may_expire_while_a_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = TrustedAddresses(b"sixteen bytes or more")
    made = P2PScheduler("d", CacheGroups(4), True, True, Options(), trusted)
    answer = request(params=dict(ANSWER)).kv_transfer_params
    signed = trusted.sign(TransferParams.parse(answer)).to_dict()
    early, late = (request(params=dict(signed), name=name) for name in ("early", "late"))
    made.on_new_request(early)
    now = time.time()
    monkeypatch.setattr(trusted_addresses.time, "time", lambda: now + 901)
    made.on_new_request(late)
    assert made.get_num_new_matched_tokens(early, 8) == (13, True)
    assert made.get_num_new_matched_tokens(late, 8) == (0, False)


def test_source_with_another_protocol_version_is_not_loaded() -> None:
    made = scheduler()
    assert made.get_num_new_matched_tokens(
        request(params=dict(ANSWER, remote_protocol=VERSION)), 8
    ) == (13, True)
    assert made.get_num_new_matched_tokens(
        request(params=dict(ANSWER, remote_protocol=VERSION + 1)), 8
    ) == (0, False)


def test_router_frees_what_it_has_aborted() -> None:
    made = scheduler()
    made.on_new_request(request(params={"do_remote_decode": True, "aborted_request": ["far", 3]}))
    assert made.build_connector_meta(NOTHING).unwanted == ["far"]


def test_request_aborted_before_scheduling_is_declined() -> None:
    made, near = scheduler(), request(params=dict(ANSWER))
    near.status = RequestStatus.FINISHED_ABORTED
    assert made.request_finished(near, []) == (False, None)
    assert made.build_connector_meta(NOTHING).released == [SOURCE]


def test_finished_prompt_is_kept_and_its_params_returned() -> None:
    made, far = scheduler(), request(params={"do_remote_decode": True}, name="far")
    far.status, far.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 21
    kept, params = made.request_finished(far, [7, 8, 9, 10, 11, 12])
    assert kept
    assert params["remote_ranks"] == [["h", 1], ["h", 2], ["h", 3]]
    assert (params["remote_block_ids"], params["tp_size"]) == ([[7, 8, 9, 10, 11, 12]], 1)  # NIXL's
    assert made.build_connector_meta(NOTHING).leases == {"far": ([7, 8, 9, 10, 11, 12], 21)}
    consumer = scheduler()
    assert consumer.get_num_new_matched_tokens(request(params=params), 0) == (21, True)


@pytest.mark.parametrize(
    ("status", "params", "produces"),
    [
        (RequestStatus.FINISHED_ABORTED, {"do_remote_decode": True}, True),
        (RequestStatus.FINISHED_LENGTH_CAPPED, None, True),
        (RequestStatus.FINISHED_LENGTH_CAPPED, {"do_remote_decode": True}, False),
    ],
)
def test_other_prompts_are_not_kept(
    status: RequestStatus, params: dict | None, produces: bool
) -> None:
    made, far = scheduler(produces), request(params=params)
    far.status, far.num_computed_tokens = status, 21
    assert made.request_finished(far, [7]) == (False, None)
    assert made.build_connector_meta(NOTHING).leases == {}


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

    said: list[str] = []
    monkeypatch.setattr(
        extension.logger, "warning", lambda form, *values: said.append(form % values)
    )
    made, near = scheduler(), request(params=ANSWER | wrong)
    assert made.get_num_new_matched_tokens(near, 0) == (0, False)
    assert made.get_num_new_matched_tokens(near, 0) == (0, False)
    (line,) = said
    assert next(iter(wrong)) in line
    assert len(line) < 500


def step(
    new: list[NewRequestData], tokens: dict[str, int], preempted: tuple[str, ...] = (), **old: Any
) -> SchedulerOutput:
    """SchedulerOutput of one step; ``old`` has (blocks, tokens computed before, whether it resumes)
    of running requests."""
    made = SchedulerOutput.make_empty()
    made.scheduled_new_reqs, made.num_scheduled_tokens, made.preempted_req_ids = (
        new,
        tokens,
        set(preempted),
    )
    cached = made.scheduled_cached_reqs = CachedRequestData.make_empty()
    for name, (ids, computed, resumed) in old.items():
        cached.req_ids.append(name)
        cached.new_block_ids.append((ids,))
        cached.num_computed_tokens.append(computed)
        if resumed:
            cached.resumed_req_ids.add(name)
    return made


def test_layerwise_prefill_for_a_waiting_consumer() -> None:
    decode = scheduler()
    asked: list[tuple] = []
    decode.consumer.client.post = lambda *arguments: asked.append(arguments)
    near = request(
        params={"do_remote_prefill": True, "metaserver": "http://router/v1/metaserver"},
        name="cmpl-7-0-12345678",
    )
    assert decode.get_num_new_matched_tokens(near, 8) == (13, True)
    decode.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55), 13)
    assert decode.build_connector_meta(NOTHING).loads == {
        near.request_id: Load(None, [52, 53, 54, 55], 8, 21)
    }
    ((name, url, wanted),) = asked
    assert (name, url) == (near.request_id, "http://router/v1/metaserver")
    assert (wanted["request_id"], wanted["do_remote_decode"]) == ("cmpl-7-0", True)

    prefill, far = scheduler(), request(params=wanted, name="far")
    assert prefill.get_num_new_matched_tokens(far, 0) == (0, False)
    prefill.update_state_after_alloc(far, blocks(7, 8), 0)
    new = NewRequestData("far", None, [], None, None, ([7, 8],), 4, None)
    places = (("h", 21), ("h", 22), ("h", 23))
    built = prefill.build_connector_meta(step([new], {"far": 4}))
    assert built.ranks == [("h", 1), ("h", 2), ("h", 3)]  # also in an instance's first step
    first = built.layerwise["far"]
    assert first == LayerwisePrefill(near.request_id, places, 21, [7, 8], 8, announced=False)
    second = prefill.build_connector_meta(step([], {"far": 8}, far=([9, 10], 8, False))).layerwise[
        "far"
    ]
    assert (second.blocks, second.tokens, second.announced) == ([7, 8, 9, 10], 16, True)
    taken = prefill.build_connector_meta(step([], {}, preempted=("far",)))
    assert (taken.revoked, taken.layerwise) == ({"far": ""}, {})
    again = prefill.build_connector_meta(
        step([], {"far": 21}, far=([3, 4, 5, 6, 7, 8], 0, True))
    ).layerwise["far"]
    assert (again.blocks, again.tokens) == ([3, 4, 5, 6, 7, 8], 21)
    assert prefill.build_connector_meta(step([], {"far": 1}, far=([], 21, False))).layerwise == {}
    far.status, far.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 21
    assert prefill.request_finished(far, [3, 4, 5, 6, 7, 8])[0]
    assert prefill.build_connector_meta(NOTHING).leases == {"far": ([3, 4, 5, 6, 7, 8], 21)}


def test_push_mode_uses_the_configured_metaserver_by_default() -> None:
    decode, asked = scheduler(), []
    decode.consumer.client.post = lambda name, url, wanted: asked.append((name, url))
    plain, own = (
        request(params={"do_remote_prefill": True}),
        {"do_remote_prefill": True, "metaserver": "http://own"},
    )
    assert decode.get_num_new_matched_tokens(plain, 0) == (0, False)  # mode pull: computed here
    decode.consumer.metaserver = "http://configured"
    for name, params, source in (
        ("plain", {"do_remote_prefill": True}, None),
        ("own", own, None),
        ("pull", ANSWER, SOURCE),
    ):
        near = request(params=dict(params), name=name + "-12345678")
        assert decode.get_num_new_matched_tokens(near, 8) == (13, True)
        decode.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55), 13)
        assert decode.build_connector_meta(NOTHING).loads[near.request_id].source == source
    assert asked == [("plain-12345678", "http://configured"), ("own-12345678", "http://own")]
    prefill = scheduler()
    prefill.consumer.metaserver = "http://configured"
    # without a waiting consumer: kept for pull
    far = request(params={"do_remote_decode": True}, name="far")
    far.status, far.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 21
    assert prefill.request_finished(far, [7, 8])[0]


def test_aborted_prefill_is_revoked_and_cancelled() -> None:
    params = {"do_remote_decode": True, "remote_reader": "near", "remote_ranks": [["h", 1]]}
    params["remote_prompt_digest"] = prompt_digest(request(), 21)
    prefill, far = scheduler(), request(params=params, name="far")
    prefill.update_state_after_alloc(far, blocks(7, 8), 0)
    far.status = RequestStatus.FINISHED_ABORTED
    assert prefill.request_finished(far, [7, 8]) == (False, None)
    meta = prefill.build_connector_meta(NOTHING)
    assert "FINISHED_ABORTED" in meta.revoked["far"]
    ((waited, how),) = meta.cancelled
    assert (waited.reader, waited.reader_ranks, how) == ("near", (("h", 1),), meta.revoked["far"])
    never = request(params=params, name="never")  # never scheduled
    never.status = RequestStatus.FINISHED_ABORTED
    assert prefill.request_finished(never, []) == (False, None)
    assert len(prefill.build_connector_meta(NOTHING).cancelled) == 1


def test_load_of_a_disconnected_client_is_aborted() -> None:
    made, near = scheduler(), request(params=dict(ANSWER))
    made.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55, 56), 21)
    near.status = RequestStatus.FINISHED_ABORTED
    assert made.request_finished(near, [50]) == (False, None)
    assert made.build_connector_meta(NOTHING).aborted == ["near"]
    made.update_state_after_alloc(
        second := request(params=dict(ANSWER), name="second"),
        blocks(50, 51, 52, 53, 54, 55, 56),
        21,
    )
    made.update_finished_loads({"second"})
    assert made.request_finished(second, [50]) == (False, None)
    assert made.build_connector_meta(NOTHING).aborted == []


def load(made: P2PScheduler, near: Request) -> tuple[int, list[Source]]:
    """Schedule a request: the tokens that it loads, and the sources released by then."""
    tokens, _ = made.get_num_new_matched_tokens(near, 0)
    made.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55), tokens)
    return tokens, made.build_connector_meta(NOTHING).released


def test_source_of_another_prompt_is_not_loaded() -> None:
    """vLLM returns the parameters of a list's first prompt, and routers give them to all prompts of
    the list."""
    made = scheduler()
    answer = request(params=dict(ANSWER)).kv_transfer_params
    prompts = {
        "first": request(params=dict(answer), name="first"),
        "second": request(params=dict(answer), name="second", first=7),
        "shorter": request(20, params=dict(answer), name="shorter"),
        "longer": request(30, params=dict(answer), name="longer"),
    }
    assert {name: load(made, near)[0] for name, near in prompts.items()} == {
        "first": 21,
        "second": 0,
        "shorter": 0,
        "longer": 21,
    }
    assert made.build_connector_meta(NOTHING).released == []


def test_digest_covers_what_determines_the_kv_cache() -> None:
    def image(offset: int, identifier: str) -> MultiModalFeatureSpec:
        return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, 4))

    embeds = torch.arange(84.0).view(21, 4)
    others = {
        "token": request(first=7),
        "adapter": request(lora_request=LoRARequest("a", 1, "/a")),
        "image": request(mm_features=[image(3, "a")]),
        "other image": request(mm_features=[image(3, "b")]),
        "image elsewhere": request(mm_features=[image(4, "a")]),
        "embeddings": request(prompt_embeds=embeds),
        "other embeddings": request(prompt_embeds=embeds + 1),
    }
    digests = {name: prompt_digest(each, 21) for name, each in others.items()} | {
        "": prompt_digest(request(), 21)
    }
    assert len(set(digests.values())) == len(digests), digests
    # only what is before it counts
    assert prompt_digest(request(30, mm_features=[image(22, "a")]), 21) == digests[""]
    assert prompt_digest(request(), 20) != digests[""]


def test_requests_that_share_a_source_release_it_once() -> None:
    """With n > 1, or if a router repeats a request, several requests name one source."""
    made, answer = scheduler(), request(params=dict(ANSWER)).kv_transfer_params
    one, other, aborted, late = (
        request(params=dict(answer), name=name) for name in ("one", "other", "aborted", "late")
    )
    assert [load(made, each) for each in (one, other, aborted)] == [(21, [])] * 3
    made.update_finished_loads({"one"})
    aborted.status = RequestStatus.FINISHED_ABORTED
    made.request_finished(aborted, [])
    meta = made.build_connector_meta(NOTHING)
    assert (meta.released, meta.aborted) == ([], ["aborted"])
    made.update_finished_loads({"other", "aborted"})
    assert made.build_connector_meta(NOTHING).released == [SOURCE]
    assert load(made, late) == (0, [])  # the producer has freed it


def test_lease_has_the_step_that_computed_its_last_tokens() -> None:
    """Not a later one, which async scheduling may have started with the request in it."""
    prefill, far = scheduler(), request(params={"do_remote_decode": True}, name="far")
    prefill.update_state_after_alloc(far, blocks(7, 8), 0)
    new = NewRequestData("far", None, [], None, None, ([7, 8],), 0, None)
    ran = [
        step([new], {"far": 8}),
        NOTHING,
        step([], {"far": 13}, far=([9], 8, False)),
        step([], {"far": 1}, far=([], 21, False)),
    ]
    assert [prefill.build_connector_meta(each).step for each in ran] == [1, 0, 3, 0]
    far.status, far.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 21
    prefill.request_finished(far, [7, 8, 9])
    assert prefill.build_connector_meta(NOTHING).written == {"far": 3}


def test_prefill_for_another_prompt_is_not_sent() -> None:
    params = {"do_remote_decode": True, "remote_reader": "near", "remote_ranks": [["h", 1]]}
    params["remote_prompt_digest"] = prompt_digest(request(), 21)
    prefill, far = scheduler(), request(params=params, name="far", first=7)
    prefill.update_state_after_alloc(far, blocks(7, 8), 0)
    new = NewRequestData("far", None, [], None, None, ([7, 8],), 0, None)
    meta = prefill.build_connector_meta(step([new], {"far": 21}))
    assert (meta.layerwise, meta.cancelled) == ({}, [])


def test_connector_implements_vllms_signatures() -> None:
    assert not AscendP2PConnector.__abstractmethods__
    own = {
        name: method
        for name, method in vars(AscendP2PConnector).items()
        if inspect.isfunction(method)
    }
    for name, method in own.items():
        asked = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
        assert list(inspect.signature(method).parameters) == list(
            inspect.signature(asked).parameters
        ), name
