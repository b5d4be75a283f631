# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_generation.py: serve prompts on an NPU, and compare with Hugging Face on the CPU.

    python harness/programs/serve_prompts.py '[{"name": ..., "model": DIR, "dtype": ..., "prompts":
    [[1, 2]], "lengths": [3], …}]'

Prints one line `RESULT {json}` a case. Log-probabilities are compared under the engine's own tokens
(teacher forcing), so that a near tie that falls the other way does not make all that follows
incomparable.
"""

import copy
import functools
import json
import os
import sys

# The engine runs in a fork of this process for each case, without a spawn.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import harness.engines.imports  # noqa: F401
import torch
from harness.engines import launcher
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt


def reference(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] in float32 for each next token after the prompt."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def compare(
    model: torch.nn.Module, rough: torch.nn.Module, prompt: list[int], output: object
) -> dict:
    """Log-probability errors of the engine, and of Hugging Face in the engine's dtype, against
    float32."""
    tokens = list(output.token_ids)
    rows, chosen = torch.arange(len(tokens)), torch.tensor(tokens)
    exact = reference(model, prompt, tokens)
    got = torch.tensor(
        [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
    )
    return {
        "errors": (got - exact[rows, chosen]).abs().tolist(),
        "own_errors": (reference(rough, prompt, tokens)[rows, chosen] - exact[rows, chosen])
        .abs()
        .tolist(),
        "regrets": (exact.max(-1).values - exact[rows, chosen]).tolist(),
        "tokens": tokens,
        "greedy": exact.argmax(-1).tolist(),
    }


def run(case: dict, rank: int, port: int) -> dict:
    """Serve the case's prompts twice (the second time with whatever the prefix cache holds) and
    compare both."""
    dtype = getattr(torch, case["dtype"])
    rough = AutoModelForCausalLM.from_pretrained(case["model"], dtype=dtype).eval()
    model = copy.deepcopy(rough).float()  # The weights as the engine has them, computed in float32.
    engine = LLM(
        case["model"],
        dtype=case["dtype"],
        skip_tokenizer_init=True,
        max_model_len=1024,
        seed=0,
        **case["engine"],
    )
    sampling = [
        SamplingParams(
            temperature=0, max_tokens=length, logprobs=0, detokenize=False, ignore_eos=True
        )
        for length in case["lengths"]
    ]
    requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in case["prompts"]]
    results = []
    for _ in range(2):
        for prompt, served in zip(
            case["prompts"], engine.generate(requests, sampling, use_tqdm=False), strict=True
        ):
            results.append(compare(model, rough, prompt, served.outputs[0]))
    preemptions = None
    if case["engine"].get("disable_log_stats") is False:
        preemptions = sum(
            each.value for each in engine.get_metrics() if each.name == "vllm:num_preemptions"
        )
    layer = next(
        iter(engine.llm_engine.vllm_config.compilation_config.static_forward_context.values())
    )
    attention = f"{type(layer.impl).__module__}.{type(layer.impl).__name__}"
    return {
        "name": case["name"],
        "attention": attention,
        "results": results,
        "preemptions": preemptions,
    }


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        (outcome,) = launcher.run_ranks(each["name"], 1, functools.partial(run, each))
        print("RESULT", json.dumps(outcome), flush=True)
