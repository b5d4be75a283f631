"""One side of tools/bench: an engine that measures what it is asked on stdin, in plain vLLM, whatever its platform.

    python tools/bench_engine.py '{"model": DIRECTORY, ...}'      the argument: keywords of vllm.LLM

A question is a line of JSON, `{"batch": 8, "prompt": 64, "output": 33}`: that many requests with that many prompt
tokens (random ones, new every time) are completed greedily. The answer is one too: `{"prefill": prompt tokens per
second until every request has its first token, "decode": generated tokens per second from then on}`. The first line of
output, `{"ready": seconds}`, tells that the engine is there. Everything else goes to stderr. With the engine in this process
(VLLM_ENABLE_V1_MULTIPROCESSING=0) the answer also has `"runner": milliseconds`, the median of what the model runner takes for
a step that decodes all requests.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any


def main() -> None:
    # File descriptor 1 is for answers only: vLLM's logger and children write to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begin = time.monotonic()
    from vllm import LLM, SamplingParams

    llm = LLM(
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # makes vLLM keep the time of each token
        **json.loads(sys.argv[1]),
    )
    steps_taken = observe(llm) if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else []
    vocabulary = llm.model_config.get_vocab_size()
    chance = random.Random(0)
    print(json.dumps({"ready": time.monotonic() - begin}), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        batch, length = question["batch"], question["prompt"]
        prompts = [{"prompt_token_ids": chance.choices(range(vocabulary), k=length)} for _ in range(batch)]
        sampling = SamplingParams(temperature=0, max_tokens=question["output"], ignore_eos=True, detokenize=False)
        steps_taken.clear()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        counts = {len(output.outputs[0].token_ids) for output in outputs}
        if counts != {question["output"]}:
            raise RuntimeError(f"asked for {question['output']} tokens per request, got {sorted(counts)}")
        # Engine core's clock. All tokens of one step have one timestamp; requests that come late start in a later step,
        # and those that run already have a token more by each of these.
        stats = [output.metrics for output in outputs]
        steps = sorted({stat.first_token_ts for stat in stats})
        later = sum(question["output"] - len(steps) + steps.index(stat.first_token_ts) for stat in stats)
        answer = {"prefill": batch * length / (steps[-1] - min(stat.queued_ts for stat in stats))}
        if later > 0:
            answer["decode"] = later / (max(stat.last_token_ts for stat in stats) - steps[-1])
        if decodes := [seconds for tokens, seconds in steps_taken if tokens == batch]:
            answer["runner"] = 1e3 * median(decodes)
        print(json.dumps(answer), file=answers)


def observe(llm: Any) -> list[list[float]]:
    """From now on, a step's tokens and the seconds that the model runner takes for it, one after the other."""
    runner, steps = llm.llm_engine.model_executor.driver_worker.worker.model_runner, []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments, **named)
            if call.__name__ == "execute_model":
                steps.append([arguments[0].total_num_scheduled_tokens, 0.0])
            steps[-1][1] += time.perf_counter() - begin
            return result

        return run

    runner.execute_model, runner.sample_tokens = timed(runner.execute_model), timed(runner.sample_tokens)
    return steps


if __name__ == "__main__":
    main()
