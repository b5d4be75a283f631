# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_two_engines.py: two engines of the same model in one process, one of which sleeps
while the other decodes.

    python harness/programs/serve_two_engines.py MODEL

Prints `RESULT {json}`: for each stage the tokens of both engines' requests; the graphs of both, and
those left without them.
"""

import gc
import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import harness.engines.imports  # noqa: F401
import torch
from vllm import LLM, SamplingParams

PROMPTS = [[3 + (7 * i + j) % 10 for j in range(5 + 4 * i)] for i in range(3)]


def engine(directory: str, length: int, mode: str) -> LLM:
    return LLM(
        directory,
        skip_tokenizer_init=True,
        max_model_len=length,
        gpu_memory_utilization=0.2,
        compilation_config={"cudagraph_capture_sizes": [1, 4], "cudagraph_mode": mode},
        enable_sleep_mode=True,
        additional_config={
            "ascend": {"communicator": {"all2all": "allgather" if length == 256 else "auto"}}
        },
    )


def start(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)


def interleaved(*engines: LLM) -> list[list[list[int]]]:
    """Tokens of each engine's requests, one step of each engine after the other."""
    for llm in engines:
        start(llm)
    texts: list[dict[str, Any]] = [{} for _ in engines]
    while any(llm.llm_engine.has_unfinished_requests() for llm in engines):
        for llm, tokens in zip(engines, texts, strict=True):
            outputs: list[Any] = llm.llm_engine.step()
            tokens |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return [[tokens[name] for name in sorted(tokens)] for tokens in texts]


def count_graphs() -> int:
    return sum(isinstance(each, torch.npu.NPUGraph) for each in gc.get_objects())


def main(directory: str) -> None:
    first = engine(directory, 256, "FULL_AND_PIECEWISE")
    (alone,) = interleaved(first)
    second = engine(directory, 512, "FULL_DECODE_ONLY")
    result = {"alone": alone, "both": interleaved(first, second)}
    first.sleep(level=1)
    result["first asleep"] = interleaved(second)
    first.wake_up()
    result["first awake"] = interleaved(second, first)
    second.sleep(level=2)
    result["second asleep"] = interleaved(first)
    gc.unfreeze()
    result["graphs"] = count_graphs()
    del first, second
    gc.collect()
    result["graphs left"] = count_graphs()
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
