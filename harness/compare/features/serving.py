# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Requests and cases of harness/programs/serve_features.py, and the comparison with transformers."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from harness import checkout
from harness.engines import npus
from harness.progress import Progress
from harness.references.log_probabilities import differences, distance

PROGRAM = checkout.PROGRAMS / "serve_features.py"


def prompts(count: int = 6) -> list[list[int]]:
    draw = random.Random(0)
    lengths = [1, 150, 7, 33, 64, 5]
    return [[draw.randrange(2, 97) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def greedy(prompt: list[int], tokens: int = 24, **more: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "sampling": {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0},
    } | more


def case(
    name: str, model: Path, ranks: int, steps: list[Any], dtype: str = "float32", **engine: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "ranks": ranks,
        "model": str(model),
        "engine": {"dtype": dtype} | engine,
        "steps": steps,
    }


def serve(
    cases: list[dict[str, Any]],
    timeout: float = 1500,
    progress: Progress | None = None,
    **variables: str,
) -> dict[str, Any]:
    """Results of harness/programs/serve_features.py by case name."""
    ranks = max(each["ranks"] for each in cases)
    quiet = {
        "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    } | variables
    done = npus.run(
        ranks,
        *(sys.executable, str(PROGRAM), json.dumps(cases)),
        timeout=timeout,
        progress=progress,
        **quiet,
    )
    result = npus.by_name(done)
    for name, each in result.items():
        assert not each["differs"], f"{name}: {each['differs']}"
    return result


def compare(model: Any, asked: list[dict[str, Any]], answers: list[Any]) -> tuple[int, int, float]:
    """Number of tokens, of those that differ from the reference's argmax, and the largest
    log-probability difference."""
    pairs = [
        distance(model, request["prompt"], answer[0])
        for request, answer in zip(asked, answers, strict=True)
    ]
    return (
        sum(len(answer[0]["tokens"]) for answer in answers),
        sum(one for one, _ in pairs),
        max(max_diff for _, max_diff in pairs),
    )


def mean_difference(
    model: Any, asked: list[dict[str, Any]], answers: list[Any]
) -> tuple[int, int, float]:
    """As :func:`compare`, with the mean log-probability difference of all tokens."""
    pairs = [
        differences(model, request["prompt"], answer)
        for request, (answer,) in zip(asked, answers, strict=True)
    ]
    every = [float(one) for _, each in pairs for one in each]
    return len(every), sum(mismatches for mismatches, _ in pairs), sum(every) / len(every)
