# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by `tools/check hybrid`: serve a model with states in several ways with one engine, and print
the answers.

    python harness/programs/serve_hybrid.py CASES.json

The file has cases `{"name": ..., "ranks": 1, "model": DIR, "prompts": [[1, 2]], "lengths": [3],
...}`. The prompts are served at once, then again, then with every third request aborted, and after
a sleep if the engine can. Prints one line `RESULT {json}` a case: for each of these the tokens with
their log-probabilities by prompt, vLLM's counters of preemptions, cached and accepted tokens, the
attentions, the dtype of the states, and the line in which ascend-platform says what computes them.
"""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import harness.engines.imports  # noqa: F401
import serve_layout
import torch
from ascend_platform.state_layers import gated_delta
from harness.engines import model_classes
from vllm import LLM, SamplingParams, TokensPrompt

COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "cached": "vllm:prefix_cache_hits",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
STEPS_BEFORE_ABORT = 3


def sampling(length: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=length, logprobs=0, detokenize=False, ignore_eos=True
    )


def with_aborts(engine: LLM, case: dict[str, Any], part: range) -> dict[int, dict[str, Any]]:
    """Answers to the requests that are not aborted, which every third is while it is computed."""
    core = engine.llm_engine
    for number in part:
        prompt = TokensPrompt(prompt_token_ids=case["prompts"][number])
        core.add_request(
            f"aborted {number}" if number % 3 == 0 else str(number),
            prompt,
            sampling(case["lengths"][number]),
        )
    answers, steps = {}, 0
    while core.has_unfinished_requests():
        outputs: list[Any] = core.step()
        for output in outputs:
            if output.finished:
                answers[int(output.request_id.split()[-1])] = serve_layout.answer(output.outputs[0])
        steps += 1
        if steps == STEPS_BEFORE_ABORT:
            core.abort_request([f"aborted {number}" for number in part if number % 3 == 0])
    return answers


def serve(case: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    common = serve_layout.COMMON | {"disable_log_stats": False, "gpu_memory_utilization": 0.5}
    engine = LLM(
        case["model"], distributed_executor_backend="external_launcher", **common | case["engine"]
    )
    config = engine.llm_engine.vllm_config
    parallel = config.parallel_config
    mine = range(parallel.data_parallel_rank, len(case["prompts"]), parallel.data_parallel_size)
    results = {name: serve_layout.answers(engine, case, mine) for name in ("at once", "again")}
    if parallel.world_size_across_dp == 1:
        results["with aborts"] = with_aborts(engine, case, mine)
    if config.model_config.enable_sleep_mode:
        engine.sleep(level=1)
        engine.wake_up()
        engine.reset_prefix_cache()
        results["after a sleep"] = serve_layout.answers(engine, case, mine[:6])
    counted = {
        metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")
    }
    return {
        "answers": results,
        "counters": {name: int(counted.get(metric, 0)) for name, metric in COUNTERS.items()},
        "rule": str(gated_delta.select(config) or ""),
        "states": config.cache_config.mamba_ssm_cache_dtype.replace(
            "auto", str(config.model_config.dtype).removeprefix("torch.")
        ),
        "kinds": serve_layout.attention_and_experts(engine),
        "graphs": config.compilation_config.cudagraph_mode.name,
        "block_size": config.cache_config.block_size,
    }


if __name__ == "__main__":
    failed = False
    for each in json.loads(Path(sys.argv[1]).read_text()):
        started = time.monotonic()
        try:
            model_classes.load(
                json.loads((Path(each["model"]) / "config.json").read_text())["architectures"]
            )
            ranks = serve_layout.play(each, each["ranks"], functools.partial(serve, each))
        except (Exception, SystemExit) as error:
            failed = True
            print(error, file=sys.stderr)
            continue
        outcome = {"name": each["name"], "seconds": time.monotonic() - started, "ranks": ranks}
        print("RESULT", json.dumps(outcome), flush=True)
    sys.exit(failed)
