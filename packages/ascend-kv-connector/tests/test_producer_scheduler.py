# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scheduler side of a producer with vLLM's requests: kept blocks, and parameters for the router."""

import inspect

import pytest
import torch
from ascend_kv_connector.connector import AscendP2PConnector
from ascend_kv_connector.p2p.scheduler.metadata import LayerwisePrefill, Load
from ascend_kv_connector.p2p.scheduler.producer import prompt_digest
from harness.kv.scheduling import NOTHING, blocks, of_windows, request, scheduler, step
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import RequestStatus


@pytest.mark.parametrize(
    ("tokens", "kept"), [(4, True), (9, False), (10, True), (21, False), (22, True)]
)
def test_prompt_with_freed_window_blocks_is_not_offered(tokens: int, kept: bool) -> None:
    producer, remote = of_windows(), request(tokens, params={"do_remote_decode": True}, name="far")
    remote.status, remote.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, tokens
    count, gone = -(-tokens // 4), max(0, tokens + 1 - 6) // 4  # as vLLM's SlidingWindowManager
    tables = [*range(10, 10 + count), *[0] * gone, *range(50 + gone, 50 + count)]
    offered, params = producer.request_finished(remote, tables)
    assert (offered, params is not None) == (kept, kept)
    assert producer.build_connector_meta(NOTHING).leases == (
        {"far": (tables, tokens)} if kept else {}
    )


def test_layerwise_is_refused_with_sliding_windows() -> None:
    producer, near = (
        of_windows(),
        request(params={"do_remote_prefill": True, "metaserver": "http://r"}),
    )
    assert producer.get_num_new_matched_tokens(near, 0) == (0, False)
    reader = {"do_remote_decode": True, "remote_reader": "d-1", "remote_ranks": [["h", 9]]}
    reader["remote_prompt_digest"] = prompt_digest(request(22), 22)
    remote = request(22, params=reader, name="far")
    producer.update_state_after_alloc(remote, blocks(*range(1, 7)), 0)
    remote.status, remote.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 22
    producer.request_finished(remote, [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 7, 8])
    ((prefill, cause),) = producer.build_connector_meta(NOTHING).cancelled
    assert prefill.reader == "d-1"
    assert "layer-by-layer transfers do not support" in cause


def test_router_frees_what_it_has_aborted() -> None:
    producer = scheduler()
    producer.on_new_request(
        request(params={"do_remote_decode": True, "aborted_request": ["far", 3]})
    )
    assert producer.build_connector_meta(NOTHING).unwanted == ["far"]


def test_finished_prompt_is_kept_and_its_params_returned() -> None:
    producer, remote = scheduler(), request(params={"do_remote_decode": True}, name="far")
    remote.status, remote.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 21
    kept, params = producer.request_finished(remote, [7, 8, 9, 10, 11, 12])
    assert kept
    assert params["remote_ranks"] == [["h", 1], ["h", 2], ["h", 3]]
    assert (params["remote_block_ids"], params["tp_size"]) == ([[7, 8, 9, 10, 11, 12]], 1)  # NIXL's
    assert producer.build_connector_meta(NOTHING).leases == {"far": ([7, 8, 9, 10, 11, 12], 21)}
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
    producer, remote = scheduler(produces), request(params=params)
    remote.status, remote.num_computed_tokens = status, 21
    assert producer.request_finished(remote, [7]) == (False, None)
    assert producer.build_connector_meta(NOTHING).leases == {}


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

    prefill, remote = scheduler(), request(params=wanted, name="far")
    assert prefill.get_num_new_matched_tokens(remote, 0) == (0, False)
    prefill.update_state_after_alloc(remote, blocks(7, 8), 0)
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
    metadata = prefill.build_connector_meta(step([], {}, preempted=("far",)))
    assert (metadata.revoked, metadata.layerwise) == ({"far": ""}, {})
    again = prefill.build_connector_meta(
        step([], {"far": 21}, far=([3, 4, 5, 6, 7, 8], 0, True))
    ).layerwise["far"]
    assert (again.blocks, again.tokens) == ([3, 4, 5, 6, 7, 8], 21)
    assert prefill.build_connector_meta(step([], {"far": 1}, far=([], 21, False))).layerwise == {}
    remote.status, remote.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 21
    assert prefill.request_finished(remote, [3, 4, 5, 6, 7, 8])[0]
    assert prefill.build_connector_meta(NOTHING).leases == {"far": ([3, 4, 5, 6, 7, 8], 21)}


def test_aborted_prefill_is_revoked_and_cancelled() -> None:
    params = {"do_remote_decode": True, "remote_reader": "near", "remote_ranks": [["h", 1]]}
    params["remote_prompt_digest"] = prompt_digest(request(), 21)
    prefill, remote = scheduler(), request(params=params, name="far")
    prefill.update_state_after_alloc(remote, blocks(7, 8), 0)
    remote.status = RequestStatus.FINISHED_ABORTED
    assert prefill.request_finished(remote, [7, 8]) == (False, None)
    meta = prefill.build_connector_meta(NOTHING)
    assert "FINISHED_ABORTED" in meta.revoked["far"]
    ((waited, how),) = meta.cancelled
    assert (waited.reader, waited.reader_ranks, how) == ("near", (("h", 1),), meta.revoked["far"])
    never = request(params=params, name="never")  # never scheduled
    never.status = RequestStatus.FINISHED_ABORTED
    assert prefill.request_finished(never, []) == (False, None)
    assert len(prefill.build_connector_meta(NOTHING).cancelled) == 1


def test_digest_covers_what_determines_the_kv_cache() -> None:
    def image(offset: int, identifier: str) -> MultiModalFeatureSpec:
        return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, 4))

    embeds = torch.arange(84.0).view(21, 4)
    variants = {
        "token": request(first=7),
        "adapter": request(lora_request=LoRARequest("a", 1, "/a")),
        "image": request(mm_features=[image(3, "a")]),
        "other image": request(mm_features=[image(3, "b")]),
        "image elsewhere": request(mm_features=[image(4, "a")]),
        "embeddings": request(prompt_embeds=embeds),
        "other embeddings": request(prompt_embeds=embeds + 1),
    }
    digests = {name: prompt_digest(each, 21) for name, each in variants.items()} | {
        "": prompt_digest(request(), 21)
    }
    assert len(set(digests.values())) == len(digests), digests
    # Only what is before it counts.
    assert prompt_digest(request(30, mm_features=[image(22, "a")]), 21) == digests[""]
    assert prompt_digest(request(), 20) != digests[""]


def test_lease_has_the_step_that_computed_its_last_tokens() -> None:
    """Not a later one, which async scheduling may have started with the request in it."""
    prefill, remote = scheduler(), request(params={"do_remote_decode": True}, name="far")
    prefill.update_state_after_alloc(remote, blocks(7, 8), 0)
    new = NewRequestData("far", None, [], None, None, ([7, 8],), 0, None)
    ran = [
        step([new], {"far": 8}),
        NOTHING,
        step([], {"far": 13}, far=([9], 8, False)),
        step([], {"far": 1}, far=([], 21, False)),
    ]
    assert [prefill.build_connector_meta(each).step for each in ran] == [1, 0, 3, 0]
    remote.status, remote.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 21
    prefill.request_finished(remote, [7, 8, 9])
    assert prefill.build_connector_meta(NOTHING).written == {"far": 3}


def test_prefill_for_another_prompt_is_not_sent() -> None:
    params = {"do_remote_decode": True, "remote_reader": "near", "remote_ranks": [["h", 1]]}
    params["remote_prompt_digest"] = prompt_digest(request(), 21)
    prefill, remote = scheduler(), request(params=params, name="far", first=7)
    prefill.update_state_after_alloc(remote, blocks(7, 8), 0)
    new = NewRequestData("far", None, [], None, None, ([7, 8],), 0, None)
    meta = prefill.build_connector_meta(step([new], {"far": 21}))
    assert (meta.layerwise, meta.cancelled) == ({}, [])


def test_connector_implements_vllms_signatures() -> None:
    assert not AscendP2PConnector.__abstractmethods__
    methods = {
        name: method
        for name, method in vars(AscendP2PConnector).items()
        if inspect.isfunction(method)
    }
    for name, method in methods.items():
        asked = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
        assert list(inspect.signature(method).parameters) == list(
            inspect.signature(asked).parameters
        ), name
