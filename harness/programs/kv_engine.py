# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""An engine in a process of its own that serves batches of requests from a pipe, for
serve_kv_transfer.py and serve_kv_store.py."""

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = 20.0
"""Seconds that a transfer may take; one that has not ended a little later is a defect."""

OPTIONS = {"insecure": True, "transfer_timeout": TIMEOUT, "answer_timeout": 5, "lease": 60}


def instance(
    pipe: Connection,
    model: str,
    devices: str,
    role: str,
    transfer: dict[str, Any],
    tiers: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve batches from the pipe until "stop"."""
    config = {
        "kv_connector": "AscendP2PConnector",
        "kv_role": role,
        "kv_connector_extra_config": OPTIONS | transfer,
    }
    if tiers:
        parts = [
            config,
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": tiers,
            },
        ]
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": parts},
        }
    serve(pipe, model, devices, config, engine)


def serve(
    pipe: Connection,
    model: str,
    devices: str,
    transfer: dict[str, Any] | None,
    engine: dict[str, Any],
    answers: dict[str, Callable[[Any], Any]] | None = None,
) -> None:
    """Run an engine that serves batches, "reset" and the commands of `answers` from the pipe, until
    "stop"."""
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = devices
    from vllm import LLM

    # long prompts take several steps
    options: dict[str, Any] = {"max_num_batched_tokens": 256, "dtype": "float32"} | engine

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=1024,
        seed=0,
        gpu_memory_utilization=0.3,
        kv_transfer_config=transfer,
        **options,
    )
    known = {"reset": lambda llm: llm.reset_prefix_cache()} | (answers or {})
    pipe.send("ready")
    while (asked := pipe.recv()) != "stop":
        pipe.send(known[asked](llm) if isinstance(asked, str) else batch(llm, asked))
    llm.llm_engine.engine_core.shutdown()


def batch(llm: Any, items: list[dict[str, Any]]) -> dict[str, Any]:
    """By name (tokens, finish reason, kv_transfer_params, tokens that were not computed,
    log-probabilities of the two likeliest tokens at each position) of requests that were not
    aborted.

    A request is aborted after `abort after` steps; log-probabilities are returned with `logprobs`.
    It may have a `salt`, and an `adapter` (name, number, directory).
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = llm.llm_engine
    for item in items:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=item["length"],
            detokenize=False,
            ignore_eos=True,
            logprobs=2 if item.get("logprobs") else None,
            extra_args={"kv_transfer_params": item["params"]} if item.get("params") else None,
        )
        prompt = {"prompt_token_ids": item["prompt"]}
        if salt := item.get("salt"):
            prompt["cache_salt"] = salt
        adapter = LoRARequest(*item["adapter"]) if item.get("adapter") else None
        engine.add_request(item["name"], prompt, sampling, lora_request=adapter)
    ended, steps = {}, 0
    while engine.has_unfinished_requests():
        steps += 1
        if aborting := [item["name"] for item in items if item.get("abort after") == steps]:
            engine.abort_request(aborting)
            if not engine.has_unfinished_requests():
                break
        for each in engine.step():
            if each.finished:
                result = each.outputs[0]
                ended[each.request_id] = (
                    list(result.token_ids),
                    result.finish_reason,
                    each.kv_transfer_params,
                    each.num_cached_tokens,
                    [
                        {token: value.logprob for token, value in place.items()}
                        for place in result.logprobs or ()
                    ],
                )
    return ended
