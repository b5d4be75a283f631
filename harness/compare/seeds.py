# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tokens of requests with a seed, under all that may be different between two runs of a server:
`tools/check seeds`.

tools/check seeds                                   all circumstances and drafters
tools/check seeds --drafter EAGLE --only preempted  these

Each cell is one engine in float32, which serves greedy requests and three samplers with seeds. Each
token is computed again, from transformers' logits, the seed and the position, which the runner, the
drafter, other requests, chunks of prompts, preemption and a restart must not change.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.compare.features import serving, speculation
from harness.models import small as small_models
from harness.progress import track
from harness.references import log_probabilities, seeds

DRAFTERS = ["none", "n-gram", "n-gram on the NPU", "EAGLE", "draft model, another", "MTP"]
DRAWN = {"draft_sample_method": "probabilistic"}
WIDE: dict[str, Any] = {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "together": WIDE,
    "one after the other": WIDE,
    "beside others": WIDE,
    "in reverse order": WIDE,
    "prompts in chunks of 33": WIDE | {"max_num_batched_tokens": 33, "max_num_seqs": 8},
    "a threshold of 50 for chunks": WIDE | {"long_prefill_token_threshold": 50},
    "from the prefix cache": {"enable_prefix_caching": True, "max_num_batched_tokens": 64},
    "preempted": WIDE | {"num_gpu_blocks_override": 20, "block_size": 16, "max_model_len": 256},
    "synchronous": WIDE | {"async_scheduling": False},
    "eager": WIDE | {"enforce_eager": True},
    "two ranks": WIDE,
    "another seed of the engine": WIDE | {"seed": 1234},
}


def steps(circumstance: str) -> list[Any]:
    """Steps of harness/programs/serve_features.py; the last ones are compared, in the order of
    :func:`asked`."""
    requests = asked(circumstance)
    if circumstance == "one after the other":
        return [["generate", [each]] for each in requests]
    if circumstance == "beside others":
        return [["generate", [*seeds.mates(), *requests]]]
    if circumstance == "from the prefix cache":
        return [["generate", requests], ["generate", requests]]
    return [["generate", requests]]


def asked(circumstance: str) -> list[dict[str, Any]]:
    ordered = seeds.requests()
    return ordered[::-1] if circumstance == "in reverse order" else ordered


def case(directory: Path, drafter: str, circumstance: str) -> dict[str, Any]:
    engine = dict(CIRCUMSTANCES[circumstance])
    model, config = speculation.methods(directory)["EAGLE" if drafter == "none" else drafter]
    if drafter == "draft model, another":
        config = config | DRAWN
    if drafter != "none":
        engine["speculative_config"] = config
    ranks = 2 if circumstance == "two ranks" else 1
    name = f"{drafter}, {circumstance}"
    return serving.case(name, model, ranks, steps(circumstance), **engine)


def answers(circumstance: str, served: dict[str, Any]) -> list[Any]:
    of_steps = served["steps"]
    if circumstance == "one after the other":
        return [answer for step in of_steps for answer in step]
    return of_steps[-1][-len(asked(circumstance)) :]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/check seeds", description=__doc__)
    parser.add_argument("--drafter", action="append", choices=DRAFTERS)
    parser.add_argument("--only", action="append", choices=CIRCUMSTANCES, metavar="CIRCUMSTANCE")
    options = parser.parse_args()
    print("| drafter | circumstance | tokens | others | preemptions | accepted drafts |")
    print(f"|{'---|' * 6}")
    failed = False
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        cells = [
            (drafter, circumstance)
            for drafter in options.drafter or DRAFTERS
            for circumstance in options.only or CIRCUMSTANCES
        ]
        for drafter, circumstance in track("drafters and circumstances:", cells):
            wanted = case(directory, drafter, circumstance)
            served = serving.serve([wanted])[wanted["name"]]
            family = "Glm4Moe" if drafter == "MTP" else "Llama"
            exact = log_probabilities.reference(small_models.target(directory, family))
            count, wrong = seeds.count_mismatches(
                exact, asked(circumstance), answers(circumstance, served)
            )
            preempted = served["counts"].get("preemptions") or 0
            accepted = speculation.accepted(served)[2]
            print(
                f"| {drafter} | {circumstance} | {count} | {wrong} | {preempted:.0f} | {accepted} |",
                flush=True,
            )
            failed |= bool(wrong) or (circumstance == "preempted" and not preempted)
    sys.exit(failed)
