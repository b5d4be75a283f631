# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_model_types.py and `tools/check model_types`: serve a model of one type, and print
its answers.

    python harness/programs/serve_model_types.py FILE

FILE is JSON: [{"name": ..., "ranks": 1, "model": DIR, "task": "generate", "prompts": [[1, 2]],
...}]. Each case runs under vLLM's external launcher, in forks, so that torch and vLLM are imported
once for all; `streams` leaves it that many of its NPU's. Prints one line `RESULT {json}` a case: for
each prompt tokens with their log-probabilities, an embedding, or scores; and which attentions
computed it, in how many groups of KV caches, with which graphs.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import harness.engines.imports  # noqa: F401
import numpy as np
import serve_layout
import torch
from ascend_platform.state_layers.kernels import gated_delta
from harness.engines import launcher, media_service, npus
from harness.models import by_type as models
from harness.models.sound_families import FAMILIES
from harness.references import multimodal
from vllm import LLM, AsyncEngineArgs, SamplingParams

SHOWN = {"FusedMMEncoderAttention", "MMEncoderAttention", "PrologAttention"}


def request(case: dict[str, Any], number: int) -> dict[str, Any]:
    prompt = case["prompts"][number]
    if case["media"] in FAMILIES:
        return multimodal.request(case["media"], number % len(multimodal.LENGTHS))
    if case["media"] == "image":
        images = models.pictures(prompt, number)
        return {"prompt": prompt} | ({"multi_modal_data": {"image": images}} if images else {})
    if case["media"] == "audio":
        heard = (models.sound(number), models.SAMPLING_RATE)
        return {"prompt_token_ids": prompt, "multi_modal_data": {"audio": heard}}
    return {"prompt_token_ids": prompt}


def answers(engine: LLM, case: dict[str, Any]) -> list[Any]:
    if case["task"] == "service":
        return [media_service.answers(engine, case["media"], case["adapter"])]
    requests: list[Any] = [request(case, i) for i in range(len(case["prompts"]))]
    if case["task"] == "generate":
        sampling = [
            SamplingParams(
                temperature=0, max_tokens=n, logprobs=0, detokenize=False, ignore_eos=True
            )
            for n in case["lengths"]
        ]
        # The second time with the contents of the prefix cache.
        served = engine.generate(requests, sampling, use_tqdm=False) + engine.generate(
            requests, sampling, use_tqdm=False
        )
        return [serve_layout.answer(output.outputs[0]) for output in served]
    if case["task"] == "embed":
        return [output.outputs.embedding for output in engine.embed(requests, use_tqdm=False)]
    if case["task"] == "token_embed":
        pooled = engine.encode(requests, pooling_task="token_embed", use_tqdm=False)
        return [output.outputs.data.flatten().tolist() for output in pooled]
    if case["task"] == "classify":
        return [output.outputs.probs for output in engine.classify(requests, use_tqdm=False)]
    first, second = case["pairs"]
    return [[output.outputs.score] for output in engine.score(first, second, use_tqdm=False)]


def encoded(runner: Any) -> dict[str, int]:
    """How many images and videos graphs have encoded, and how many eagerly although there are."""
    state = getattr(runner, "model_state", None)  # of the V2 runner
    manager = getattr(runner, "encoder_cudagraph_manager", None)
    if state is not None and state.supports_mm_inputs:
        manager = state.encoder_runner.cudagraph_manager
    return {"graphs": manager.graph_hits, "eagerly": manager.graph_misses} if manager else {}


def serve(case: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    graphs = npus.take_streams(case.get("streams"))
    engine = LLM(
        case["model"],
        distributed_executor_backend="external_launcher",
        seed=0,
        disable_log_stats=True,
        dtype=case["dtype"],
        tensor_parallel_size=case["ranks"],
        **({"gpu_memory_utilization": 0.3} | case["engine"]),
    )
    config = engine.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    modules = {type(module).__name__ for module in runner.get_model().modules()}
    is_gated_delta_net = any("GatedDeltaNet" in name for name in modules)
    rules = {gated_delta.rules.prefill.__qualname__} if is_gated_delta_net else set()
    served = answers(engine, case)
    del graphs
    return {
        "results": served,
        "encoded": encoded(runner),
        "counted": getattr(config.compilation_config, "num_encoder_graphs", 0),
        "kinds": sorted(
            {type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}
            | (modules & SHOWN)
            | rules
        ),
        "groups": len(runner.kv_cache_config.kv_cache_groups),
        "dtype": str(config.model_config.dtype),
        "graphs": config.compilation_config.cudagraph_mode.name,
    }


def play(case: dict[str, Any]) -> list[Any]:
    """The answers of each rank."""
    options = {
        name: case["engine"][name]
        for name in ("max_model_len", "runner", "trust_remote_code")
        if name in case["engine"]
    }
    # vLLM inspects the model's class in a process, once.
    AsyncEngineArgs(case["model"], **options).create_model_config()

    def one(rank: int, port: int) -> Any:
        os.environ.update(launcher.torchrun_variables(rank, case["ranks"], port))
        return serve(case)

    return launcher.run_ranks(case["name"], case["ranks"], one)


if __name__ == "__main__":
    np.random.seed(0)
    failed = False
    for each in json.loads(Path(sys.argv[1]).read_text()):
        started = time.monotonic()
        try:
            served = play(each)
        except SystemExit as error:
            failed = True
            print(error, file=sys.stderr)
            continue
        outcome = {
            "name": each["name"],
            "seconds": time.monotonic() - started,
            "differs": launcher.difference([rank["results"] for rank in served]),
            **served[0],
        }
        print("RESULT", json.dumps(outcome), flush=True)
    sys.exit(failed)
