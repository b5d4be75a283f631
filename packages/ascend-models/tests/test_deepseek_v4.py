# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""DeepSeek-V4 through vLLM's engine, compared with transformers in float32.

The tiny random model has layers of each type, published head sizes, and selects 16 of up to 130
compressed entries. Prompts are beyond the window and beyond groups of 128 tokens.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from harness import checkout
from harness.compare import families
from harness.compare.families import EXACT
from harness.models import deepseek_v4

PROGRAM = checkout.PROGRAMS / "serve_deepseek_v4.py"
LENGTHS = (300, 7, 135, 61, 530)
MUTATIONS = (
    "sink",
    "window",
    "ratio",
    "overlap",
    "position bias",
    "selection",
    "Sinkhorn steps",
    "hash table",
    "limit of SwiGLU",
    "output groups",
    "rotation back",
)


prompts = functools.partial(families.prompts, (2, 256))


LONG = tuple(prompts(2060)[0])  # A block of the layers of ratio 128 is 2,048 tokens.
EVERY: dict[str, dict[str, Any]] = {
    "chunks that end inside groups": {
        "engine": {"dtype": "float32", "max_num_batched_tokens": 90},
        "batches": [prompts(*LENGTHS)],
        "length": 10,
        "mutations": MUTATIONS,
    },
    "whole prompts at once": {
        "engine": {
            "dtype": "float32",
            "max_num_batched_tokens": 2048,
            "enable_sleep_mode": True,
        },
        "batches": [prompts(*LENGTHS)],
        "length": 4,
        "sleeps": True,
    },
    "prefix hits": {
        "whole": True,  # Transformers computes 2,060 tokens of three prompts.
        "engine": {"dtype": "float32", "max_num_batched_tokens": 700, "max_model_len": 4096},
        "batches": [[[*LONG, 3]], prompts(9, 150, start=LONG)],
        "length": 8,
    },
    "preemption": {
        "engine": {"dtype": "float32", "max_num_batched_tokens": 90},
        "batches": [prompts(190, 150)],
        "length": 8,
        "preempted_at": 7,  # both have begun to answer
    },
    "TP2": {
        "whole": True,
        "ranks": 2,
        "engine": {"dtype": "float32", "max_num_batched_tokens": 90},
        "batches": [prompts(150, 290)],
        "length": 6,
    },
    "TP2 EP2": {
        "ranks": 2,
        "engine": {
            "dtype": "float32",
            "max_num_batched_tokens": 90,
            "enable_expert_parallel": True,
        },
        "batches": [prompts(150, 290)],
        "length": 6,
    },
    "PP2": {
        "whole": True,
        "ranks": 2,
        "layout": {"pipeline_parallel_size": 2},
        "engine": {"dtype": "float32", "max_num_batched_tokens": 90},
        "batches": [prompts(150, 290)],
        "length": 6,
    },
    "DP2 EP2, decodes in graphs": {
        "ranks": 2,
        "layout": {"data_parallel_size": 2, "enable_expert_parallel": True},
        "engine": {
            "dtype": "float32",
            "max_num_batched_tokens": 90,
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [4]},
        },
        "batches": [prompts(150, 290, 61)],  # One engine has none at the end.
        "length": 6,
    },
    "MTP, decodes in graphs": {
        "engine": {
            "dtype": "float32",
            "max_num_batched_tokens": 512,
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [12]},
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        },
        "batches": [prompts(124, 61, 250)],
        "length": 16,
    },
    "decodes in graphs": {
        "engine": {
            "dtype": "float32",
            "max_num_batched_tokens": 90,
            "max_num_seqs": 16,
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [16]},
        },
        "batches": [prompts(124, 61, 250)],  # The graph of 16 requests is padded.
        "length": 12,
    },
    "FP8 and MXFP4": {
        "engine": {
            "dtype": "float32",
            "max_num_batched_tokens": 512,
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        },
        "batches": [prompts(150, 290)],
        "length": 4,
    },
    "bfloat16": {
        "engine": {"dtype": "bfloat16", "max_num_batched_tokens": 90},
        "batches": [prompts(*LENGTHS)],
        "length": 10,
    },
}
CASES = families.cases(EVERY)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("deepseek-v4")
    deepseek_v4.write(folder)
    quantized = folder / "quantized"
    deepseek_v4.quantize(folder, quantized)
    cases = [{"name": name, "model": str(folder), **case} for name, case in CASES.items()]
    drafting = folder / "drafting"
    deepseek_v4.write(drafting, embedding=8)
    for case in cases:
        if "MTP" in case["name"]:
            case |= {"model": str(drafting), "drafts": str(drafting / "mtp")}
        if case["name"] == "FP8 and MXFP4":
            exact = quantized / "reference"
            case |= {"model": str(quantized), "reference": str(exact), "drafts": str(exact / "mtp")}
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
@pytest.mark.skipif("prefix hits" not in CASES, reason="tools/check families")
def test_prefixes_are_hit(results: dict[str, Any]) -> None:
    assert results["prefix hits"]["cached"] == 2 * 2048


@pytest.mark.slow
def test_requests_are_preempted(results: dict[str, Any]) -> None:
    assert results["preemption"]["preemptions"] == 2


@pytest.mark.slow
def test_answers_after_sleep_are_the_same(results: dict[str, Any]) -> None:
    assert results["whole prompts at once"]["same after sleep"] == [True, True]


@pytest.mark.slow
def test_drafts_are_those_of_transformers_parts(results: dict[str, Any]) -> None:
    result = results["MTP, decodes in graphs"]
    assert result["drafts"] > 30
    assert result["other drafts"] == results["FP8 and MXFP4"]["other drafts"] == 0
    assert 0 < result["accepted"] < result["drafts"]  # some right, some rejected


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_each_part_is_found(name: str, results: dict[str, Any]) -> None:
    result = results["chunks that end inside groups"]["mutations"][name]
    print(name, result)
    assert result["most"] > 20 * EXACT
