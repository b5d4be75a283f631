"""One side of tools/bench: an engine that measures what it is asked on stdin, in plain vLLM, whatever its platform.

    python tools/bench_engine.py '{"model": DIRECTORY, ...}'      the argument: keywords of vllm.LLM

A question is a line of JSON, `{"batch": 8, "prompt": 64, "output": 33}`: that many requests with that many prompt
tokens (random ones, new every time) are completed greedily. The answer is one too: `{"prefill": prompt tokens per
second until every request has its first token, "decode": generated tokens per second from then on}`. The first line of
output, `{"ready": seconds}`, tells that the engine is there. Everything else goes to stderr.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time


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
    vocabulary = llm.model_config.get_vocab_size()
    chance = random.Random(0)
    print(json.dumps({"ready": time.monotonic() - begin}), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        batch, length = question["batch"], question["prompt"]
        prompts = [{"prompt_token_ids": chance.choices(range(vocabulary), k=length)} for _ in range(batch)]
        sampling = SamplingParams(temperature=0, max_tokens=question["output"], ignore_eos=True, detokenize=False)
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
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
