# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_pause.py: pause and resume an engine in each of vLLM's modes.

    python harness/programs/pause_generation.py MODEL

Prints `RESULT {json}` for each mode: the tokens of two requests without a pause and with one, how
many had arrived when the engine was paused and half a second later, and why they finished.
"""

import asyncio
import json
import sys
from typing import Any

import harness.engines.imports  # noqa: F401
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

PROMPTS, TOKENS = [[3, 4, 5], [7, 8]], 120
BEFORE_PAUSE = 5


async def serve(engine: AsyncLLM, mode: str) -> dict[str, Any]:
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    arrived: dict[str, Any] = {}

    async def generate(name: str, prompt: list[int]) -> list[Any]:
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
            arrived[name] = output.outputs[0]
        return [list(arrived[name].token_ids), arrived[name].finish_reason]

    def count() -> list[int]:
        return [len(each.token_ids) for each in arrived.values()]

    def start(prefix: str) -> list[Any]:
        named = (generate(f"{prefix} {mode} {i}", prompt) for i, prompt in enumerate(PROMPTS))
        return [asyncio.create_task(each) for each in named]

    record: dict[str, Any] = {"name": mode, "whole": await asyncio.gather(*start("whole"))}
    arrived.clear()
    tasks = start("paused")
    while len(arrived) < len(PROMPTS) or min(count()) < BEFORE_PAUSE:
        await asyncio.sleep(0.001)
    await engine.pause_generation(mode=mode, clear_cache=mode != "keep")  # type: ignore[arg-type]
    record["is paused"], record["when paused"] = await engine.is_paused(), count()
    await asyncio.sleep(0.5)
    record["later"] = count()
    await engine.resume_generation()
    record["paused"] = await asyncio.gather(*tasks)
    record["is paused after"] = await engine.is_paused()
    record["again"] = await asyncio.gather(*start("again"))
    return record


async def main(model: str) -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": 4}
    arguments = AsyncEngineArgs(model, gpu_memory_utilization=0.3, seed=0, **options)
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        for mode in ("keep", "wait", "abort"):
            print("RESULT", json.dumps(await serve(engine, mode)), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
