# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by `tools/check launches`, with a trace: count what a step of small models launches and moves
on one rank.

    python count_launches.py '[{"name": ..., "config": {...}, "ranks": 1, "engine": {...},
    "requests": 16, "prompt": 63, "layers": [2, 3], "sampling": {...}}]'

Each case runs once for each number of layers: with one more the difference is a layer's. Prints a
line `RESULT {json}` a case, with the summaries of each run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import harness.engines.imports  # noqa: F401
import torch
from harness.engines import launcher, trace
from harness.models import by_type
from transformers import AutoConfig
from vllm import LLM, PoolingParams, SamplingParams

COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "dtype": "bfloat16",
    "seed": 0,
    "max_model_len": 1024,
}
COMMON |= {
    "gpu_memory_utilization": 0.3,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
}
COMMON |= {
    "disable_log_stats": True,
    "async_scheduling": False,
    "distributed_executor_backend": "external_launcher",
}
# This counts what a graph would capture: vLLM switches fusions off in eager mode.
COMMON |= {
    "enforce_eager": True,
    "compilation_config": {"pass_config": {"fuse_norm_quant": True}},
}


def steps(case: dict[str, Any], directory: Path) -> dict[str, Any]:
    given, layers = case["config"], {"num_hidden_layers": case["layers"]}
    if "layer_types" in given:
        layers["layer_types"] = given["layer_types"][: case["layers"]]
    given |= {"text_config": given["text_config"] | layers} if "text_config" in given else layers
    config = AutoConfig.for_model(**given)
    config.save_pretrained(directory)
    pools = case["engine"].get("runner") == "pooling"
    if pools:  # for which vLLM wants a tokenizer
        by_type.tokenizer().save_pretrained(directory)
    engine = LLM(
        str(directory), **COMMON | {"skip_tokenizer_init": not pools} | case["engine"]
    ).llm_engine
    # vLLM's warm-up leaves its parameters in the states.
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and not pools:
        for request in range(case["requests"]):
            asked = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
            engine.add_request(f"first {request}", {"prompt_token_ids": [3, 4]}, asked)
        while engine.has_unfinished_requests():
            engine.step()
    torch.manual_seed(0)

    def add(request: int, case: dict[str, Any]) -> None:
        vocabulary = config.get_text_config().vocab_size
        prompt = torch.randint(3, vocabulary, (case["prompt"],)).tolist()
        if case.get("distinct"):
            prompt = torch.randperm(vocabulary)[: case["prompt"]].tolist()
        wanted: SamplingParams | PoolingParams = PoolingParams(task="embed")
        if not pools:
            asked = {"temperature": 0, "max_tokens": 16} | case.get("sampling", {})
            wanted = SamplingParams(**asked, detokenize=False, ignore_eos=True)
        engine.add_request(str(request), {"prompt_token_ids": prompt}, wanted)

    for request in range(case["requests"]):
        add(request, case)
    counts, before = {}, len(trace.events())
    for name in ("prefill",) if pools else ("prefill", "first decode", "decode", "mixed"):
        if name == "mixed":
            add(case["requests"], case)
        engine.step()
        counts[name], before = trace.events()[before:], len(trace.events())
    has_groups = "layer_types" in given
    return {name: summary(counts[name], has_groups) for name in counts if name != "first decode"}


def summary(step: list[dict], has_groups: bool) -> dict[str, Any]:
    """Of a step; of a model with types of layers without the metadata before its embedding. Another
    layer adds a KV cache group there, which has about a dozen layers in a model of real depth."""
    whole = trace.summary(step)
    if not has_groups:
        return whole
    begin = min((event["ts"] for event in step if event["name"] == "aclnnEmbedding"), default=0)
    layers = trace.summary([event for event in step if event["ts"] >= begin])
    return layers | {name: whole[name] for name in ("waits", "ai_cpu", "compilations")}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The summaries of rank 0 with `case["layers"]` layers."""

    def one(rank: int, port: int) -> dict[str, Any]:
        os.environ.update(launcher.torchrun_variables(rank, case["ranks"], port))
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as directory:
            return steps(case, Path(directory))

    return launcher.run_ranks(case["name"], case["ranks"], one)[0]


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        runs = [run(each | {"layers": layers}) for layers in each["layers"]]
        print("RESULT", json.dumps({"name": each["name"], "runs": runs}), flush=True)
