# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""MiniMax-M3 through vLLM's engine, compared with transformers in float32.

The tiny random model has layers of both types, published head and block sizes, and selects 3 of up
to 13 blocks of keys.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from harness import checkout
from harness.compare import families
from harness.compare.families import EXACT
from harness.models import minimax_m3

PROGRAM = checkout.PROGRAMS / "serve_minimax_m3.py"
MUTATIONS = (
    "number of blocks",
    "local block",
    "first block",
    "block boundaries",
    "selection",
    "heads",
    "index rotation",
    "index norm",
    "limit of SwiGLU",
    "router bias",
)
TEXT = {"language_model_only": True, "max_model_len": 2048}


prompts = functools.partial(families.prompts, (2, 250))


LONG = tuple(prompts(520)[0])
EVERY: dict[str, dict[str, Any]] = {
    "chunks, prefix hits, preemption": {
        "engine": TEXT | {"dtype": "float32", "max_num_batched_tokens": 200},
        "batches": [prompts(700, 7, 260), [[*LONG, 3]], prompts(9, 150, start=LONG)],
        "length": 8,
        "preempted_at": 7,
        "mutations": MUTATIONS,
    },
    # The built-in attention of dense layers in float32 is not captured.
    "no dense layers, decodes in graphs": {
        "layers": minimax_m3.SPARSE,
        "engine": TEXT
        | {
            "dtype": "float32",
            "max_num_batched_tokens": 2048,  # whole prompts
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [4]},
        },
        "batches": [prompts(1600, 120, 300)],  # The graph of 4 requests is padded.
        "length": 12,
    },
    "TP2 EP2": {
        "whole": True,
        "ranks": 2,
        "engine": TEXT
        | {"dtype": "float32", "max_num_batched_tokens": 200, "enable_expert_parallel": True},
        "batches": [prompts(600, 290)],
        "length": 6,
    },
    "PP2": {
        "ranks": 2,
        "layout": {"pipeline_parallel_size": 2},  # The second stage has no dense layers.
        "engine": TEXT | {"dtype": "float32", "max_num_batched_tokens": 200},
        "batches": [prompts(600, 290)],
        "length": 6,
    },
    "bfloat16, decodes in graphs": {
        "engine": TEXT
        | {
            "dtype": "bfloat16",
            "max_num_batched_tokens": 1024,
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [4]},
        },
        "batches": [prompts(700, 7, 260)],
        "length": 10,
    },
}
CASES = families.cases(EVERY)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("minimax-m3")
    cases = []
    for name, case in CASES.items():
        layers = case.get("layers", minimax_m3.BOTH)
        model = folder / f"layers {len(layers)}"
        if not model.exists():
            minimax_m3.write(model, layers)
        cases.append({"name": name, "model": str(model), **case})
    return families.serve(PROGRAM, folder, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "bfloat16" not in name])
def test_answers_in_float32_are_those_of_transformers(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    print(name, {key: value for key, value in result.items() if key != "mutations"})
    assert result["tokens"] == CASES[name]["length"] * sum(map(len, CASES[name]["batches"]))
    assert result["others"] == 0
    assert result["most"] < EXACT


@pytest.mark.slow
def test_answers_in_bfloat16_are_near_those_of_transformers(results: dict[str, Any]) -> None:
    result = results["bfloat16, decodes in graphs"]
    print(result)
    assert result["mean"] < 2 * result["own mean"]


@pytest.mark.slow
def test_prefixes_are_hit_and_requests_preempted(results: dict[str, Any]) -> None:
    result = results["chunks, prefix hits, preemption"]
    assert result["cached"] >= 2 * 512
    assert result["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_each_part_is_found(name: str, results: dict[str, Any]) -> None:
    result = results["chunks, prefix hits, preemption"]["mutations"][name]
    print(name, result)
    assert result["most"] > 20 * EXACT
