# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Outputs that are read after a step's graphs, with each drafter, in each graph mode: `tools/check
outputs`.

tools/check outputs                                      all drafters and modes tools/check outputs
--drafter EAGLE --mode PIECEWISE     these

The target's hidden states are a graph's output. A drafter computes its first draft token from them,
and vLLM computes log-probabilities of prompts from them, after a drafter's graphs have been
replayed. Each cell serves prompts with a model in float16 and compares with transformers:
log-probabilities of prompts and of answers, and tokens. As many draft tokens must be accepted as
without graphs, and with vLLM's V2 model runner the routed experts, which it returns, must be the
same. A rounding may change the tokens that sparse attention selects, without graphs, too; in each
mode it must be the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.compare import graphs
from harness.compare.features import serving, speculation
from harness.engines import vllm_runner
from harness.progress import track
from harness.references import log_probabilities

DRAFTERS = ["none", "n-gram on the NPU", "draft model, another", "EAGLE", "EAGLE-3", "MTP"]
DRAFTERS += ["MTP, latent attention", "MTP, sparse latent attention"]
SIZES = [1, 2, 4, 8, 16, 64, 256]
CLOSE = 0.05
"""In float16, the most that a log-probability differs by where no choice of experts is a tie."""


def case(directory: Path, drafter: str, mode: str, ranks: int = 1, **engine: Any) -> dict[str, Any]:
    model, config = speculation.methods(directory)["EAGLE" if drafter == "none" else drafter]
    engine |= {"compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES}}
    if drafter != "none":
        engine["speculative_config"] = config
        if "MTP" in drafter and vllm_runner.IS_V2:
            engine["enable_return_routed_experts"] = True
    return serving.case(
        f"{drafter}, {mode}", model, ranks, [["generate", asked()]], "float16", **engine
    )


def asked() -> list[dict[str, Any]]:
    """Requests for log-probabilities of prompts, which are as long as two steps, as a captured
    size, and shorter."""
    return of_prompts([*serving.prompts(), serving.prompts()[1] * 2, serving.prompts()[4]])


def of_prompts(prompts: list[list[int]]) -> list[dict[str, Any]]:
    requests = [serving.greedy(prompt) for prompt in prompts]
    for request in requests:
        request["sampling"] |= {"prompt_logprobs": 0}
    return requests


def compare(
    model: Any, requests: list[dict[str, Any]], answers: list[Any], close: float = CLOSE
) -> dict[str, int]:
    """Numbers of values, of those that differ from transformers' by more than `close`, and of
    tokens that are not its choice."""
    import torch

    counts = {"prompt": 0, "prompt_wrong": 0, "tokens": 0, "others": 0, "wrong": 0}
    for request, (answer,) in zip(requests, answers, strict=True):
        whole, rest = request["prompt"] + answer["tokens"], len(request["prompt"]) - 1
        scores = log_probabilities.logits(model, whole[:1], [whole[1:]])[0].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(whole[1:])[:, None])[:, 0].tolist()
        given = zip(answer["prompt_logprobs"] + answer["logprobs"], expected, strict=True)
        # True also where one is not a number.
        is_far = [not abs(one - other) <= close for one, other in given]
        counts["prompt"] += rest
        counts["prompt_wrong"] += sum(is_far[:rest])
        counts["tokens"] += len(answer["tokens"])
        counts["others"] += int((scores[rest:].argmax(-1) != torch.tensor(answer["tokens"])).sum())
        counts["wrong"] += sum(is_far[rest:])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/check outputs", description=__doc__)
    parser.add_argument("--drafter", action="append", choices=DRAFTERS)
    parser.add_argument("--mode", action="append", choices=graphs.MODES)
    options = parser.parse_args()
    columns = [
        "prompt log-probabilities",
        "wrong",
        "tokens",
        "others",
        "wrong log-probabilities",
        "accepted drafts",
    ]
    print(
        f"| drafter | mode | {' | '.join([*columns, 'routed experts'])}"
        f" |\n|{'---|' * (3 + len(columns))}"
    )
    failed = False
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        eager: Any = None
        modes = dict.fromkeys(["NONE", *(options.mode or graphs.MODES)])
        served_with = [(drafter, mode) for drafter in options.drafter or DRAFTERS for mode in modes]
        for drafter, mode in track("drafters and modes:", served_with):
            eager = None if mode == "NONE" else eager
            wanted = case(directory, drafter, mode)
            served = serving.serve([wanted])[wanted["name"]]
            exact = log_probabilities.reference(Path(wanted["model"]), None, "float16")
            answers = served["steps"][0]
            comparison, accepted = compare(exact, asked(), answers), speculation.accepted(served)[2]
            experts = [answer.get("routed_experts") for (answer,) in answers]
            all_found = comparison | {"accepted": accepted, "experts": experts}
            eager = eager or all_found
            is_wrong = all_found != eager
            is_wrong |= "sparse" not in drafter and bool(
                comparison["prompt_wrong"] or comparison["others"] or comparison["wrong"]
            )
            failed |= is_wrong
            same = (
                "" if experts[0] is None else "as NONE" if experts == eager["experts"] else "others"
            )
            cells = [
                drafter,
                mode,
                *comparison.values(),
                f"{accepted}, {eager['accepted']} in NONE",
                same,
            ]
            print(f"| {' | '.join(map(str, cells))} |{' WRONG' if is_wrong else ''}", flush=True)
    sys.exit(failed)
