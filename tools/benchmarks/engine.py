# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""One side of tools/bench: an engine of plain vLLM, on any platform, that runs the measurements
requested on stdin.

    python tools/benchmarks/engine.py '{"model": DIRECTORY, ...}'      the argument: keywords of
    vllm.LLM

A question is a line of JSON, `{"batch": 8, "prompt": 64, "output": 33}`: that many requests with
that many prompt tokens (random ones, new every time; with `"period": 4` the first four again and
again) are completed greedily. The answer is one too: `{"prefill": prompt tokens per second until
every request has its first token, "decode": generated tokens per second from then on}`. The first
line of output, `{"ready": seconds, "versions": {"torch": …}}`, tells that the engine is there.
Everything else goes to stderr. With the engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)
the answer also has `"runner": milliseconds`, the median of what the model runner takes for a step
that decodes all requests; and if the question has `"kernels": true`, `"kernels": milliseconds`,
what the CPU's operators take of such a step by PyTorch's profiler.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

SHELLS = """
alias as_strided chunk contiguous detach empty empty_like empty_strided expand flatten item lift_fresh narrow permute
reshape resize_ result_type select slice split split_with_sizes squeeze t to transpose unbind unflatten unsqueeze view
view_as _reshape_alias _local_scalar_dense _to_copy _unsafe_view
"""
"""Operators that compute nothing. All others count as the CPU's work, with what it takes to call
them."""


def main() -> None:
    # File descriptor 1 is for answers only: vLLM's logger and children write to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begin = time.monotonic()
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # Makes vLLM record the time of each token.
        **json.loads(sys.argv[1]),
    )
    steps_taken = observe(llm) if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else []
    vocabulary = llm.model_config.get_vocab_size()
    chance = random.Random(0)
    modules = {
        name: sys.modules.get(name.replace("-", "_")) for name in ("vllm", "torch", "torch-npu")
    }
    versions = {name: str(module.__version__) for name, module in modules.items() if module}
    print(json.dumps({"ready": time.monotonic() - begin, "versions": versions}), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        batch, length = question["batch"], question["prompt"]
        period = question.get("period", length)
        parts = [chance.choices(range(vocabulary), k=period) for _ in range(batch)]
        prompts = [
            TokensPrompt(prompt_token_ids=(part * -(-length // period))[:length]) for part in parts
        ]
        sampling = SamplingParams(
            temperature=0, max_tokens=question["output"], ignore_eos=True, detokenize=False
        )
        steps_taken.clear()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        counts = {len(output.outputs[0].token_ids) for output in outputs}
        if counts != {question["output"]}:
            raise RuntimeError(
                f"asked for {question['output']} tokens per request, got {sorted(counts)}"
            )
        # Engine core's clock. All tokens of one step have one timestamp; requests that come late
        # start in a later step, and those that run already have a token more by each of these.
        stats: list[Any] = [output.metrics for output in outputs]
        steps = sorted({stat.first_token_ts for stat in stats})
        later = sum(
            question["output"] - len(steps) + steps.index(stat.first_token_ts) for stat in stats
        )
        answer = {"prefill": batch * length / (steps[-1] - min(stat.queued_ts for stat in stats))}
        if later > 0:
            answer["decode"] = later / (max(stat.last_token_ts for stat in stats) - steps[-1])
        if decodes := [seconds for tokens, seconds in steps_taken if tokens == batch]:
            answer["runner"] = 1e3 * median(decodes)
        if question.get("kernels"):
            answer["kernels"] = kernels(
                partial(llm.generate, prompts, sampling, use_tqdm=False), batch
            )
        print(json.dumps(answer), file=answers)


def kernels(generate: Callable[[], Any], batch: int) -> float:
    """Milliseconds spent in operators during a decode step of all requests."""
    from torch.profiler import ProfilerActivity, profile

    shells = {f"aten::{name}" for name in SHELLS.split()}
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        generate()
    events = list(profiled.events())
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.name == f"runner {batch}"
    )
    own = sorted(
        (event.time_range.start, event.self_cpu_time_total)
        for event in events
        if event.name.startswith(("aten::", "_C")) and event.name not in shells
    )
    starts = [start for start, _ in own]
    taken = sum(
        time
        for first, last in spans
        for _, time in own[bisect_left(starts, first) : bisect_right(starts, last)]
    )
    return taken / 1e3 / max(1, len(spans) // 2)  # a step is two calls


def observe(llm: Any) -> list[list[float]]:
    """Record each step's number of tokens and the model runner's seconds from now on."""
    from torch.profiler import record_function

    runner, steps = llm.llm_engine.model_executor.driver_worker.worker.model_runner, []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if call.__name__ == "execute_model":
                steps.append([arguments[0].total_num_scheduled_tokens, 0.0])
            begin = time.perf_counter()
            with record_function(f"runner {steps[-1][0]}"):  # for kernels()
                result = call(*arguments, **named)
            steps[-1][1] += time.perf_counter() - begin
            return result

        return run

    runner.execute_model, runner.sample_tokens = (
        timed(runner.execute_model),
        timed(runner.sample_tokens),
    )
    return steps


if __name__ == "__main__":
    main()
