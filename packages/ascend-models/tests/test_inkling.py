# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Inkling through vLLM's engine, compared with transformers in float32.

The tiny random model has layers of both types, dense and with experts. Prompts are beyond the
window, the extent of the biases and the floor of the logarithmic scaling.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from harness import checkout
from harness.compare import families
from harness.compare.families import EXACT
from harness.models import inkling

PROGRAM = checkout.PROGRAMS / "serve_inkling.py"
MUTATIONS = (
    "biases",
    "extent",
    "window",
    "log scaling",
    "taps",
    "taps of values",
    "router bias",
    "shared experts",
    "scale of dense layers",
    "width multiplier",
)
TEXT = {"tokenizer_mode": "hf"}  # Inkling's own reads the tokenizer, which the model does not have.


prompts = functools.partial(families.prompts, (2, 256))


LONG = tuple(prompts(258)[0])
EVERY: dict[str, dict[str, Any]] = {
    "chunks, prefix hits, preemption": {
        "engine": TEXT | {"dtype": "float32", "max_num_batched_tokens": 90},
        "batches": [prompts(300, 7, 135, 61), [[*LONG, 3]], prompts(9, 150, start=LONG)],
        "length": 8,
        "preempted_at": 9,
        "mutations": MUTATIONS,
    },
    "whole prompts at once, decodes in graphs": {
        "engine": TEXT
        | {
            "dtype": "float32",
            "max_num_batched_tokens": 1024,
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [4]},
        },
        "batches": [prompts(530, 61, 250)],  # The graph of 4 requests is padded.
        "length": 12,
    },
    "TP2 EP2": {
        "ranks": 2,
        "engine": TEXT
        | {"dtype": "float32", "max_num_batched_tokens": 90, "enable_expert_parallel": True},
        "batches": [prompts(150, 290)],
        "length": 6,
    },
    "PP2": {
        "whole": True,
        "ranks": 2,
        "layout": {"pipeline_parallel_size": 2},
        "engine": TEXT | {"dtype": "float32", "max_num_batched_tokens": 90},
        "batches": [prompts(150, 290)],
        "length": 6,
    },
    "bfloat16": {
        "engine": TEXT | {"dtype": "bfloat16", "max_num_batched_tokens": 90},
        "batches": [prompts(300, 7, 135)],
        "length": 10,
    },
}
CASES = families.cases(EVERY)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("inkling")
    inkling.write(folder)
    named = {"model": str(folder), "reference": str(folder / "reference")}
    cases = [{"name": name, **named, **case} for name, case in CASES.items()]
    return families.serve(PROGRAM, folder, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "bfloat16"])
def test_answers_in_float32_are_those_of_transformers(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    print(name, {key: value for key, value in result.items() if key != "mutations"})
    assert result["tokens"] == CASES[name]["length"] * sum(map(len, CASES[name]["batches"]))
    assert result["others"] == 0
    assert result["most"] < EXACT


@pytest.mark.slow
def test_answers_in_bfloat16_are_near_those_of_transformers(results: dict[str, Any]) -> None:
    result = results["bfloat16"]
    print(result)
    assert result["mean"] < 2 * result["own mean"]


@pytest.mark.slow
def test_prefixes_are_hit_and_requests_preempted(results: dict[str, Any]) -> None:
    result = results["chunks, prefix hits, preemption"]
    assert result["cached"] >= 2 * 256
    assert result["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_each_part_is_found(name: str, results: dict[str, Any]) -> None:
    result = results["chunks, prefix hits, preemption"]["mutations"][name]
    print(name, result)
    assert result["most"] > 20 * EXACT
