# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Requests and steps of vLLM's scheduler for the scheduler side of a connector."""

from types import SimpleNamespace
from typing import Any

from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p.scheduler.cache_groups import CacheGroups
from ascend_kv_connector.p2p.scheduler.metadata import Endpoint
from ascend_kv_connector.p2p.scheduler.producer import prompt_digest
from ascend_kv_connector.p2p.scheduler.scheduler import P2PScheduler
from ascend_kv_connector.p2p.transfers import Source
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

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
    new_request = Request(
        request_id=name, prompt_token_ids=ids, sampling_params=sampling, pooling_params=None, **more
    )
    if params and "remote_num_tokens" in params and isinstance(params["remote_num_tokens"], int):
        params.setdefault(
            "remote_prompt_digest", prompt_digest(new_request, params["remote_num_tokens"])
        )
    return new_request


def scheduler(produces: bool = True, consumes: bool = True) -> P2PScheduler:
    urls = ["http://router/v1/metaserver", "http://configured", "http://own"]
    trusted = TrustedAddresses(metaservers=urls, insecure=True)
    instance = P2PScheduler("d", CacheGroups(4), produces, consumes, Options(), trusted)
    instance.set_endpoints(
        {(1, 0): Endpoint("h", 3, 23), (0, 1): Endpoint("h", 2, 22), (0, 0): Endpoint("h", 1, 21)}
    )
    return instance


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def of_windows() -> P2PScheduler:
    trusted = TrustedAddresses(metaservers=["http://r"], insecure=True)
    instance = P2PScheduler("d", CacheGroups(4, (0, 6)), True, True, Options(), trusted)
    instance.set_endpoints({(0, 0): Endpoint("h", 1, 21)})
    return instance


def step(
    new: list[NewRequestData], tokens: dict[str, int], preempted: tuple[str, ...] = (), **old: Any
) -> SchedulerOutput:
    """SchedulerOutput of one step; ``old`` has (blocks, tokens computed before, whether it resumes)
    of running requests."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs, output.num_scheduled_tokens, output.preempted_req_ids = (
        new,
        tokens,
        set(preempted),
    )
    cached = output.scheduled_cached_reqs = CachedRequestData.make_empty()
    for name, (ids, computed, resumed) in old.items():
        cached.req_ids.append(name)
        cached.new_block_ids.append((ids,))
        cached.num_computed_tokens.append(computed)
        if resumed:
            cached.resumed_req_ids.add(name)
    return output


def load(metadata: P2PScheduler, near: Request) -> tuple[int, list[Source]]:
    """Schedule a request: the tokens that it loads, and the sources released by then."""
    tokens, _ = metadata.get_num_new_matched_tokens(near, 0)
    metadata.update_state_after_alloc(near, blocks(50, 51, 52, 53, 54, 55), tokens)
    return tokens, metadata.build_connector_meta(NOTHING).released
