"""Run by test_layouts.py and tools/layouts: serve prompts in parallel layouts on several NPUs, and print the tokens.

    python tests/layout_cases.py '[{"name": ..., "ranks": 2, "model": DIR, "prompts": [[1, 2]], "lengths": [3], "engine": {}}]'

A case with `ranks` runs under vLLM's external launcher: that many processes, as torchrun would start them, but forked, so that
torch and vLLM are imported once for all cases; torchrun can start this program too, for one case. A case without runs under the
multiprocessing executor, as `vllm serve` does.
Prints one line `RESULT {json}` a case, with each prompt's tokens and their log-probabilities as each rank has them.
"""

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.distributed import parallel_state
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker import gpu_worker  # noqa: F401  (before the forks, each of which would import it again)

COMMON = {"skip_tokenizer_init": True, "max_model_len": 1024, "seed": 0, "disable_log_stats": True}


def sampling(length: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, logprobs=0, detokenize=False, ignore_eos=True)


def answer(completion: Any) -> dict[str, Any]:
    tokens = list(completion.token_ids)
    logprobs = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
    return {"tokens": tokens, "logprobs": logprobs}


def attention_and_experts(engine: LLM) -> list[str]:
    """What the engine's layers compute with, and how the tokens of experts travelled."""
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    kinds = {type(getattr(layer, "impl", None) or layer._quant_method).__name__ for layer in layers}
    group = parallel_state._EP  # with dense models there is none
    manager = group and group.device_communicator and group.device_communicator.all2all_manager
    return sorted(kinds | getattr(manager, "taken", set()))


def rank_of_external_launcher(case: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine = LLM(case["model"], distributed_executor_backend="external_launcher", **COMMON, **case["engine"])
    # each data-parallel engine has its own part of the prompts
    parallel = engine.llm_engine.vllm_config.parallel_config
    mine = range(parallel.data_parallel_rank, len(case["prompts"]), parallel.data_parallel_size)
    served = engine.generate(
        [{"prompt_token_ids": case["prompts"][i]} for i in mine], [sampling(case["lengths"][i]) for i in mine], use_tqdm=False
    )
    results = {i: answer(output.outputs[0]) for i, output in zip(mine, served, strict=True)}
    return {"results": results, "kinds": attention_and_experts(engine)}


def external_launcher(case: dict[str, Any]) -> dict[str, Any]:
    AsyncEngineArgs(case["model"], **COMMON).create_model_config()  # vLLM looks at the model's class in a process, once
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        children = [fork(case, rank, port, Path(directory, str(rank))) for rank in range(case["ranks"])]
        failed = [os.waitpid(child, 0)[1] for child in children]
        if any(failed):
            sys.exit(f"{case['name']}: the ranks ended with {failed}")
        found = [json.loads(Path(directory, str(rank)).read_text()) for rank in range(case["ranks"])]
    results: list[list[Any]] = [[] for _ in case["prompts"]]
    for rank in found:
        for number, result in rank["results"].items():
            results[int(number)].append(result)
    return {"results": results, "kinds": found[0]["kinds"]}


def fork(case: dict[str, Any], rank: int, port: int, file: Path) -> int:
    child = os.fork()
    if not child:
        status = 1
        try:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case["ranks"]))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **case.get("environ", {}))
            file.write_text(json.dumps(rank_of_external_launcher(case)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return child


async def executor(case: dict[str, Any]) -> dict[str, Any]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(case["model"], **COMMON, **case["engine"]))

    async def generate(number: int, prompt: list[int], length: int) -> list[dict[str, Any]]:
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling(length), str(number)):
            last = output.outputs[0]
        return [answer(last)]

    try:
        served = zip(range(len(case["prompts"])), case["prompts"], case["lengths"], strict=True)
        return {"results": await asyncio.gather(*(generate(*each) for each in served))}
    finally:
        engine.shutdown()


def outcome_of(case: dict[str, Any]) -> dict[str, Any]:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        results = rank_of_external_launcher(case)["results"]
        return {"results": [[results[number]] for number in range(len(case["prompts"]))]}
    if "ranks" in case:
        return external_launcher(case)
    return asyncio.run(executor(case))


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        started = time.monotonic()
        outcome = outcome_of(each)
        print("RESULT", json.dumps({"name": each["name"], "seconds": time.monotonic() - started, **outcome}), flush=True)
