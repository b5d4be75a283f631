# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_parallelism.py and `tools/check layouts`: serve prompts in a parallel layout, and
print the tokens.

    python harness/programs/serve_layout.py '[{"name": ..., "ranks": 2, "model": DIR, "prompts": [[1,
    2]], "lengths": [3], "bad_words": [[1, 2]], …}]'

A case with `ranks` runs under vLLM's external launcher: that many processes, as torchrun would
start them, but forked, so that torch and vLLM are imported once for all cases; torchrun can start
this program too, for one case. A case without runs under the multiprocessing executor, as `vllm
serve` does. Prints one line `RESULT {json}` a case, with each prompt's tokens and their
log-probabilities as each rank has them.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import harness.engines.imports  # noqa: F401
import torch
from harness.engines import launcher
from harness.references import multimodal
from vllm import LLM, AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.distributed import parallel_state
from vllm.v1.engine.async_llm import AsyncLLM

COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "seed": 0,
    "disable_log_stats": True,
    "trust_remote_code": True,  # openPangu's configuration
}


def sampling(length: int, bad_words: list[list[int]] | None = None) -> SamplingParams:
    parameters = SamplingParams(
        temperature=0, max_tokens=length, logprobs=0, detokenize=False, ignore_eos=True
    )
    parameters._bad_words_token_ids = bad_words  # vLLM needs a tokenizer for bad_words.
    return parameters


def answer(completion: Any) -> dict[str, Any]:
    tokens = list(completion.token_ids)
    logprobs = [
        step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)
    ]
    return {"tokens": tokens, "logprobs": logprobs}


def attention_and_experts(engine: LLM) -> list[str]:
    """Implementations of the engine's attention and MoE layers, the all-to-all backends that were
    used, and options in effect."""
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    kinds = {
        type(getattr(layer, "impl", None) or getattr(layer, "_quant_method", layer)).__name__
        for layer in layers
    }
    group = parallel_state._EP  # with dense models there is none
    manager = group and group.device_communicator and group.device_communicator.all2all_manager
    (modules,) = engine.apply_model(lambda model: list(model.modules()))
    if any(getattr(layer, "prolog_weights", ()) for layer in layers):
        kinds.add("npu_mla_prolog_v3")
    if any(getattr(module, "_output_ready_event", None) for module in modules):
        kinds.add("shared experts' stream")
    return sorted(kinds | getattr(manager, "used", set()))


def answers(engine: LLM, case: dict[str, Any], part: range) -> dict[int, dict[str, Any]]:
    """The engine's answers to this part of the case's prompts, by number."""
    asked = [TokensPrompt(prompt_token_ids=case["prompts"][i]) for i in part]
    parameters = [sampling(case["lengths"][i], case.get("bad_words")) for i in part]
    served = engine.generate(asked, parameters, use_tqdm=False)
    return {i: answer(output.outputs[0]) for i, output in zip(part, served, strict=True)}


def by_prompt(ranks: list[dict[str, Any]], case: dict[str, Any]) -> list[list[Any]]:
    """For each prompt the answers of the ranks that have one."""
    return [[rank[str(i)] for rank in ranks if str(i) in rank] for i in range(len(case["prompts"]))]


def engine_of_external_launcher(case: dict[str, Any]) -> LLM:
    torch.set_num_threads(1)
    return LLM(
        case["model"], distributed_executor_backend="external_launcher", **(COMMON | case["engine"])
    )


def rank_of_external_launcher(case: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of_external_launcher(case)
    # Each data-parallel engine has its own part of the prompts.
    parallel = engine.llm_engine.vllm_config.parallel_config
    mine = range(parallel.data_parallel_rank, len(case["prompts"]), parallel.data_parallel_size)
    mode = engine.llm_engine.vllm_config.compilation_config.cudagraph_mode
    # The V2 runner has no such event, and copies each step's inputs from other memory.
    waits = engine.collective_rpc(
        lambda worker: getattr(worker.model_runner, "prepare_inputs_event", "") is not None
    )[0]
    before = outside_of_torch()
    record = {
        "results": answers(engine, case, mine),
        "mode": mode.name,
        "waits": waits,
        "grown": outside_of_torch() - before,
    }
    return record | {"kinds": attention_and_experts(engine)}


def outside_of_torch(_worker: Any = None) -> int:
    """Bytes of this NPU's memory that torch has not allocated, such as HCCL's buffers."""
    torch.npu.synchronize()
    free, total = torch.npu.mem_get_info()
    return total - free - torch.npu.memory_reserved()


def play(case: dict[str, Any], ranks: int, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on each rank, with torchrun's environment variables; returns the results."""
    # vLLM inspects the model's class in a process, once.
    AsyncEngineArgs(case["model"], **COMMON).create_model_config()

    def one(rank: int, port: int) -> Any:
        os.environ.update(launcher.torchrun_variables(rank, ranks, port))
        return work()

    return launcher.run_ranks(case["name"], ranks, one)


def external_launcher(case: dict[str, Any]) -> dict[str, Any]:
    records = play(case, case["ranks"], lambda: rank_of_external_launcher(case))
    results = by_prompt([rank["results"] for rank in records], case)
    return {"results": results, "grown": max(rank["grown"] for rank in records)} | {
        name: records[0][name] for name in ("kinds", "mode", "waits")
    }


async def executor(case: dict[str, Any]) -> dict[str, Any]:
    # for functions as arguments of collective_rpc()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(case["model"], **(COMMON | case["engine"])))

    async def generate(number: int, prompt: Any, length: int) -> list[dict[str, Any]]:
        request: Any = {"prompt_token_ids": prompt}
        if kind := case.get("media"):
            request = multimodal.request(kind, number % len(multimodal.LENGTHS))
        async for output in engine.generate(request, sampling(length), str(number)):
            last = output.outputs[0]
        return [answer(last)]

    try:
        served = zip(range(len(case["prompts"])), case["prompts"], case["lengths"], strict=True)
        before = await engine.collective_rpc(outside_of_torch)  # type: ignore[arg-type]  # AsyncLLM names strings only
        results = await asyncio.gather(*(generate(*each) for each in served))
        after = await engine.collective_rpc(outside_of_torch)  # type: ignore[arg-type]
        return {"results": results, "grown": max(b - a for a, b in zip(before, after, strict=True))}
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
        print(
            "RESULT",
            json.dumps({"name": each["name"], "seconds": time.monotonic() - started, **outcome}),
            flush=True,
        )
