# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by tests and `tools/check`: serve requests with LoRA adapters, draft tokens, sampling
parameters and grammars.

    python harness/programs/serve_features.py '[{"name": ..., "ranks": 1, "model": DIR, "engine":
    {...}, "steps": [...]}]'

A step is `["generate", [request, ...]]`, where a request has `prompt` (token ids), `sampling`, and
perhaps `structured`, `lora` (name, number, directory) and `embedded`, of how many of the prompt's
tokens the embeddings are given, from the `first` on, or `["add" | "remove" | "pin" | "list",
...]` for adapters, or `["count", [request, ...]]`, for what one step of decode launches and how
often the host waits in it, with a trace (ASCEND_EMULATOR_TRACE), or `["tools", [request, ...]]`,
for the tool calls that vLLM's parser of Hermes' format reads from the answers, streamed and as a
whole. Each case runs under vLLM's external launcher, which forks the ranks, so that torch and vLLM
are imported once. Prints one line `RESULT {json}` a case: what each step gave on rank 0, and the
counts of drafts and of accepted ones.
"""

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness.engines.imports  # noqa: F401
import serve_layout
import torch
from harness.engines import launcher
from safetensors.torch import load_file
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

COMMON: dict[str, Any] = {
    "max_model_len": 512,
    "seed": 0,
    "gpu_memory_utilization": 0.3,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
}
COUNTS = {
    name: f"vllm:spec_decode_num_{name}"
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
} | {"preemptions": "vllm:num_preemptions"}


def read(request: dict[str, Any]) -> tuple[dict[str, Any], SamplingParams, LoRARequest | None]:
    structured = (
        StructuredOutputsParams(**request["structured"]) if "structured" in request else None
    )
    params = SamplingParams.from_optional(structured_outputs=structured, **request["sampling"])
    adapter = LoRARequest(*request["lora"]) if "lora" in request else None
    return embeddings(**request), params, adapter


def embeddings(
    prompt: list[int], model: str = "", first: int = 0, embedded: int = 0, **_: Any
) -> dict[str, Any]:
    """A prompt as token ids, as embeddings, or as both with a mask of the token ids."""
    if not embedded:
        return {"prompt_token_ids": prompt}
    is_token = [not first <= index < first + embedded for index in range(len(prompt))]
    ids = [each if known else 0 for each, known in zip(prompt, is_token, strict=True)]
    weights = load_file(Path(model) / "model.safetensors")["model.embed_tokens.weight"]
    rows = weights[prompt]
    if not any(is_token):
        return {"prompt_embeds": rows}
    rows[torch.tensor(is_token)] = 9.0  # which must not be read
    return {"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": is_token}


def generate(engine: LLM, requests: list[dict[str, Any]]) -> list[Any]:
    """For each request and each of its `n` answers: tokens, text, and log-probabilities if
    requested."""
    prompts, params, adapters = map(list, zip(*map(read, requests), strict=True))
    served = engine.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    return [[answer(each) | of_prompt(output) for each in output.outputs] for output in served]


def of_prompt(output: Any) -> dict[str, Any]:
    """Log-probabilities of a prompt's tokens from the second on, and the routed experts of prompt
    and answer, if requested."""
    logprobs: dict[str, Any] = {}
    if output.prompt_logprobs is not None:
        rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        logprobs["prompt_logprobs"] = [row[token].logprob for token, row in rows]
    if (experts := getattr(output.outputs[0], "routed_experts", None)) is not None:
        logprobs["routed_experts"] = experts.tolist()
    return logprobs


def count(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """``trace.summary`` and synchronizations of the second decode step, for requests that are
    prefilled in one step."""
    from harness.engines import trace

    for number, request in enumerate(requests):
        prompt, params, adapter = read(request)
        engine.add_request(str(number), prompt, params, lora_request=adapter)
    for _ in range(2):
        engine.step()
    before = len(trace.events())
    engine.step()
    events = trace.events()[before:]
    waits = sum(
        event["cat"] == "synchronize" or event["name"] in trace.HOST_COPIES for event in events
    )
    totals = trace.summary(events) | {"synchronizations": waits - 1}  # without the trace's own
    while engine.has_unfinished_requests():
        engine.step()
    return totals


def tool_calls(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each request its tokens, the largest number that came at once, and the calls as streamed
    and from the whole text."""
    tokenizer = engine.get_tokenizer()
    parsers: dict[str, Any] = {}
    calls: dict[str, dict[str, Any]] = {}
    for number, request in enumerate(requests):
        prompt, params, _ = read(request)
        params.output_kind = RequestOutputKind.DELTA
        engine.llm_engine.add_request(str(number), prompt, params)
        parsers[str(number)] = Hermes2ProToolParser(tokenizer)
        calls[str(number)] = {"tokens": [], "text": "", "largest": 0, "streamed": {}}
    asked = ChatCompletionRequest(messages=[], model="", seed=0)
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            tool_call, part = calls[output.request_id], output.outputs[0]
            text, tokens = tool_call["text"] + part.text, tool_call["tokens"] + list(part.token_ids)
            delta = parsers[output.request_id].extract_tool_calls_streaming(
                tool_call["text"],
                text,
                part.text,
                tool_call["tokens"],
                tokens,
                list(part.token_ids),
                asked,
            )
            tool_call |= {
                "text": text,
                "tokens": tokens,
                "largest": max(tool_call["largest"], len(part.token_ids)),
            }
            for call in delta.tool_calls if delta else []:
                name, arguments = tool_call["streamed"].setdefault(call.index, ["", ""])
                tool_call["streamed"][call.index] = [
                    name + (call.function.name or ""),
                    arguments + (call.function.arguments or ""),
                ]
    for tool_call in calls.values():
        whole = (
            Hermes2ProToolParser(tokenizer).extract_tool_calls(tool_call["text"], asked).tool_calls
        )
        tool_call["whole"] = [[call.function.name, call.function.arguments] for call in whole]
        tool_call["streamed"] = [
            tool_call["streamed"][index] for index in sorted(tool_call["streamed"])
        ]
    return [calls[str(number)] for number in range(len(requests))]


def answer(completion: Any) -> dict[str, Any]:
    record = {
        "tokens": list(completion.token_ids),
        "text": completion.text,
        "reason": completion.finish_reason,
    }
    return record if completion.logprobs is None else record | serve_layout.answer(completion)


def perform(engine: LLM, step: list[Any]) -> Any:
    do, *arguments = step
    core = engine.llm_engine
    if do == "generate":
        return generate(engine, *arguments)
    if do == "tools":
        return tool_calls(engine, *arguments)
    if do == "count":
        return count(core, *arguments)
    try:
        if do == "list":
            return sorted(core.list_loras())
        calls: dict[str, Callable[[Any], bool]] = {
            "add": core.add_lora,
            "remove": core.remove_lora,
            "pin": core.pin_lora,
        }
        return calls[do](LoRARequest(*arguments) if do == "add" else arguments[0])
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def serve(case: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    os.environ.update(launcher.torchrun_variables(rank, case["ranks"], port))
    torch.set_num_threads(1)
    engine = LLM(
        case["model"],
        distributed_executor_backend="external_launcher",
        **options(case),
        disable_log_stats=False,
    )
    steps = [perform(engine, step) for step in case["steps"]]
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    named = {name: metrics.get(metric) for name, metric in COUNTS.items()}
    counts = {
        name: getattr(metric, "value", None) or getattr(metric, "values", None)
        for name, metric in named.items()
        if metric
    }
    is_async = engine.llm_engine.vllm_config.scheduler_config.async_scheduling
    return {"steps": steps, "counts": counts, "async": is_async}


def answers(case: dict[str, Any], ranks: list[dict[str, Any]]) -> list[list[Any]]:
    """Each rank's steps without those that count: where its host waits is a matter of time."""
    is_answer = [do != "count" for do, *_ in case["steps"]]
    return [list(itertools.compress(rank["steps"], is_answer)) for rank in ranks]


def options(case: dict[str, Any]) -> dict[str, Any]:
    return COMMON | {"tensor_parallel_size": case["ranks"]} | case["engine"]


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        # vLLM inspects the model's class in a process, once.
        AsyncEngineArgs(each["model"]).create_model_config()
        ranks = launcher.run_ranks(each["name"], each["ranks"], functools.partial(serve, each))
        record = {"name": each["name"], "differs": launcher.difference(answers(each, ranks))}
        print("RESULT", json.dumps(record | ranks[0]), flush=True)
