# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by harness/compare/graphs.py on emulated NPUs: serve prompts with one graph mode, and compare with
transformers.

    python harness/programs/serve_graphs.py '[{"mode": "FULL", "ranks": 1, "prompts": [[1, 2]],
    "lengths": [3], "streams": 40}]'

The model is a Qwen3 of three layers with random weights. Prints a line `RESULT {json}` a case: of
each request the tokens, and how far their log-probabilities are from transformers' in float32; the
graphs that each step of five requests launched, by the trace (ASCEND_EMULATOR_TRACE), except with
`streams`; the sizes that were captured; and the bytes of KV cache memory that are left for graphs.
`streams` leaves the engine that many of each NPU's streams: graphs that are captured before take
the others.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import tempfile
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import harness.engines.imports  # noqa: F401
import torch
from harness.engines import launcher, npus
from serve_prompts import compare
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import CUDAGraphMode

COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "seed": 0,
    "max_model_len": 1024,
    "gpu_memory_utilization": 0.3,
}
COMMON |= {"max_num_seqs": 16, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
COMMON |= {"distributed_executor_backend": "external_launcher"}


SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}
SHAPE |= {"initializer_range": 0.1}  # choices with clear margins


def graphs_launched() -> int:
    from harness.engines import trace  # which wants a trace

    return sum(event["name"] == "aclmdlRIExecuteAsync" for event in trace.events())


def serve(case: dict[str, Any]) -> dict[str, Any]:
    graphs = npus.take_streams(case.get("streams"))
    options: dict[str, Any] = (
        {"compilation_config": {"cudagraph_mode": case["mode"]}} if case["mode"] else {}
    )
    engine = LLM(case["model"], tensor_parallel_size=case["ranks"], **COMMON, **options)
    greedy: dict[str, Any] = {
        "temperature": 0,
        "logprobs": 0,
        "detokenize": False,
        "ignore_eos": True,
    }
    asked = [SamplingParams(max_tokens=length, **greedy) for length in case["lengths"]]
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in case["prompts"]], asked, use_tqdm=False
    )
    launched = []
    if "streams" not in case:
        inner = engine.llm_engine
        for number, prompt in enumerate(case["prompts"][:5]):
            inner.add_request(
                str(number),
                {"prompt_token_ids": prompt[:8]},
                SamplingParams(max_tokens=6, ignore_eos=True),
            )
        before = graphs_launched()
        while inner.has_unfinished_requests():
            inner.step()
            launched.append(graphs_launched() - before)
            before += launched[-1]
    worker = engine.llm_engine.model_executor.driver_worker.worker
    runner = worker.model_runner
    # of V2, and of V1
    manager = getattr(runner, "cudagraph_manager", None) or runner.cudagraph_dispatcher
    keys = manager.cudagraph_keys if hasattr(manager, "cudagraph_keys") else manager._capture_descs
    captured = {
        name: sorted(key.num_tokens for key in keys.get(CUDAGraphMode[name], ()))
        for name in ("PIECEWISE", "FULL")
    }
    del graphs
    left = worker.available_kv_cache_memory_bytes - sum(
        size for each in runner.kv_caches for size in map(nbytes, each)
    )
    mode = str(manager.cudagraph_mode)
    return {
        "outputs": outputs,
        "launched": launched,
        "captured": captured,
        "mode": mode,
        "left": left,
    }


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def play(case: dict[str, Any], rank: int, port: int) -> dict[str, Any] | None:
    """The work of one rank; the first also compares with transformers."""
    os.environ.update(launcher.torchrun_variables(rank, case["ranks"], port))
    torch.set_num_threads(1)
    result = serve(case)
    if rank:
        return None
    rough = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.bfloat16).eval()
    model = copy.deepcopy(rough).float()
    pairs = zip(case["prompts"], result.pop("outputs"), strict=True)
    return result | {
        "requests": [compare(model, rough, prompt, output.outputs[0]) for prompt, output in pairs]
    }


def main(cases: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(directory)
        for case in cases:
            given = case | {"model": directory}
            ranks = launcher.run_ranks("graphs", case["ranks"], functools.partial(play, given))
            print("RESULT", json.dumps(ranks[0]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
