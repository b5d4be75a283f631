# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Penalties, logits processors, grammars, thinking budgets and prompts as embeddings, with each
drafter, with and without asynchronous scheduling and preemption: `tools/check constraints`.

tools/check constraints                         all drafters
tools/check constraints --drafter EAGLE         this one

Each cell is two engines in float32, one with thinking budgets. Each token is computed again from
transformers' logits, the request's parameters and the tokens before it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.compare.features import serving, speculation
from harness.progress import track
from harness.references import constraints, log_probabilities

DRAFTERS = ["none", "n-gram", "n-gram on the NPU", "EAGLE", "draft model, another", "MTP"]
COMMON: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
}
MEMORY: dict[str, dict[str, Any]] = {
    "enough": {},
    "preempted": {"num_gpu_blocks_override": 20, "block_size": 16, "max_model_len": 256},
}


def cases(
    directory: Path, drafter: str, is_async: bool, memory: str
) -> tuple[Path, list[dict[str, Any]]]:
    """The model, and the case with all constraints and the one with budgets."""
    model, config = speculation.methods(directory)["EAGLE" if drafter == "none" else drafter]
    engine: dict[str, Any] = (
        COMMON | MEMORY[memory] | ({} if is_async else {"async_scheduling": False})
    )
    if drafter != "none":
        engine["speculative_config"] = config
    constrained = ["generate", constraints.requests(model, drafter != "none")]
    budgets = [["generate", constraints.with_budgets(seed)] for seed in range(2)]
    return model, [
        serving.case("constraints", model, 1, [constrained], **engine, enable_prompt_embeds=True),
        serving.case("budgets", model, 1, budgets, **engine, **constraints.THINKING),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/check constraints", description=__doc__)
    parser.add_argument("--drafter", action="append", choices=DRAFTERS)
    parser.add_argument("--memory", action="append", choices=MEMORY)
    options = parser.parse_args()
    print(
        "| drafter | scheduling | memory | tokens | others | tokens with budgets | others | forced"
        f" | preemptions | accepted drafts |\n|{'---|' * 10}"
    )
    failed = False
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        cells = [
            (drafter, is_async, memory)
            for drafter in options.drafter or DRAFTERS
            for is_async in (True, False)
            for memory in options.memory or MEMORY
        ]
        for drafter, is_async, memory in track("engines:", cells):
            model, served = cases(directory, drafter, is_async, memory)
            results = serving.serve(served)
            exact = log_probabilities.reference(model)
            asked = constraints.requests(model, drafter != "none")
            count, mismatches, lines = constraints.wrong(
                exact, asked, results["constraints"]["steps"][0]
            )
            budgets = [
                constraints.beyond_budgets(exact, constraints.with_budgets(seed), answers)
                for seed, answers in enumerate(results["budgets"]["steps"])
            ]
            of_budgets = [sum(each) for each in zip(*budgets, strict=True)]
            preempted = sum(
                int(each["counts"].get("preemptions") or 0) for each in results.values()
            )
            accepted = sum(speculation.accepted(each)[2] for each in results.values())
            scheduling = "asynchronous" if results["constraints"]["async"] else "synchronous"
            cell = [
                drafter,
                scheduling,
                memory,
                count,
                mismatches,
                *of_budgets,
                preempted,
                accepted,
            ]
            print(f"| {' | '.join(map(str, cell))} |", *lines, sep="\n", flush=True)
            failed |= bool(mismatches or of_budgets[1]) or (memory == "preempted" and not preempted)
    sys.exit(failed)
