# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Parallel layouts on several NPUs: the tokens of Hugging Face transformers in each.

Here are those that cover the others, under vLLM's external launcher. `tools/check layouts` runs all
of them, also under the multiprocessing executor, as `vllm serve` does.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import checkout
from harness.compare import layouts
from harness.engines import npus, vllm_runner

LAYOUTS = layouts.OF_EXPERTS | layouts.OF_ONE_KEY_HEAD | layouts.OF_OPTIONS | layouts.OF_PREFILLS
LAYOUTS |= layouts.OF_DRAFTS
V2 = vllm_runner.IS_V2
"""vLLM supports this under its external launcher only without pipelines."""
PROGRAM = checkout.PROGRAMS / "serve_layout.py"
# Name: (model, dtype, layout, backend). float32 shows any routing error; MC2 supports only half
# types.
CASES = {
    "dense TP2": ("adder", "bfloat16", "TP2", "FusedAttentionImpl"),
    "dense PP2": ("adder", "bfloat16", "PP2", "FusedAttentionImpl"),
    "a stage without attention, PP2": ("qwen3-next", "float32", "PP2", "NPUGatedDeltaNetAttention"),
    "shared experts, groups, TP2": (
        "glm4-moe",
        "float32",
        "TP2 shared_experts_stream",
        "shared experts' stream",
    ),
    "dense TP2 DCP2": ("one-key-head", "bfloat16", "TP2 DCP2", "FusedAttentionImpl"),
    "latents TP2 DCP2": ("deepseek-v3", "bfloat16", "TP2 DCP2", "FusedLatentAttentionImpl"),
    "latents by mla_prolog, PP2": (
        "deepseek-v3, mla_prolog",
        "bfloat16",
        "PP2 mla_prolog",
        "npu_mla_prolog_v3",
    ),
    "latents by mla_prolog, DP2 EP2": (
        "deepseek-v3, mla_prolog",
        "bfloat16",
        "DP2 EP2 mla_prolog",
        "npu_mla_prolog_v3",
    ),
    "DP2 EP2 by alltoall": ("qwen3-moe", "float32", "DP2 EP2 alltoall", "alltoall"),
    "DP2 EP2 by mc2": ("mixtral", "bfloat16", "DP2 EP2 mc2", "mc2"),
    # A rank that decodes one token, which cannot be divided.
    "latents TP2 DP2 EP4": ("deepseek-v3", "float32", "TP2 DP2 EP4", "alltoall"),
}

if V2:
    CASES |= {
        "dense PCP2": ("adder", "bfloat16", "PCP2", "FusedAttentionImpl"),
        "dense TP2 PCP2 EP4": ("glm4-moe", "float32", "TP2 PCP2 EP4", "PagedAttentionImpl"),
        "windows, sinks, PCP2": ("gpt-oss", "bfloat16", "PCP2", "SinkAttentionImpl"),
        "latents PCP2": ("deepseek-v3", "bfloat16", "PCP2", "FusedLatentAttentionImpl"),
        "latents PCP2 EP2": ("deepseek-v3", "float32", "PCP2 EP2", "PagedLatentAttentionImpl"),
        "selected tokens, TP2 PCP2": (
            "deepseek-v3.2",
            "bfloat16",
            "TP2 PCP2",
            "FusedSparseLatentAttentionImpl",
        ),
        "n-gram drafts, PP2": ("adder", "bfloat16", "PP2 n-grams", "FusedAttentionImpl"),
    }

ABSENT = [[0, 0, 0]]
"""A word in no answer: the sampler looks for it in each request's tokens."""

OF_PROCESSES = {"a stage without attention, PP2"}
"""Served by an executor of processes: under vLLM's external launcher each rank has a scheduler, and
stages whose caches differ schedule other steps."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    paths = {
        model: layouts.make(model, directory)
        for model, *_ in CASES.values()
        if model in layouts.MODELS or model in layouts.OF_KINDS
    }
    return {"adder": layouts.ADDER} | paths


@pytest.fixture(scope="module")
def results(models: dict[str, Path]) -> dict[str, Any]:
    cases = [
        layouts.case(
            name,
            models[model],
            LAYOUTS[layout],
            dtype=dtype,
            mp=name in OF_PROCESSES or (V2 and "PP" in layout),
        )
        | {"bad_words": ABSENT if "PCP" in layout else None}
        for name, (model, dtype, layout, _) in CASES.items()
    ]
    done = npus.run(
        4, sys.executable, str(PROGRAM), json.dumps(cases), VLLM_PLUGINS="", OMP_NUM_THREADS="1"
    )
    return npus.by_name(done)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(
    results: dict[str, Any], models: dict[str, Path], name: str
) -> None:
    model, dtype, _, served_by = CASES[name]
    # They are not needed under an executor with processes.
    assert served_by in results[name].get("kinds", [served_by])
    count, mismatches, max_diff, mean = layouts.compare(
        models[model], dtype, results[name]["results"]
    )
    print(
        f"{name}: {count} tokens, {mismatches} others; log-probability difference max {max_diff:.2e} mean"
        f" {mean:.2e}"
    )
    assert count == 33
    if dtype == "float32":
        assert mismatches == 0
        assert max_diff < 1e-4
    elif model == "adder":  # trained: clear choices
        assert mismatches == 0
        assert mean < 0.01
    else:  # Rounding can decide a near tie of tokens or experts.
        assert mismatches <= 3
        assert mean < 0.1


@pytest.mark.skipif(V2, reason="the V2 model runner copies each step's inputs from other memory")
def test_pipeline_stage_waits_before_it_overwrites_inputs(results: dict[str, Any]) -> None:
    assert results["dense PP2"]["waits"]


@pytest.mark.parametrize(
    "name", ["dense PP2", "dense TP2 DCP2", *(["dense PCP2", "latents PCP2"] if V2 else [])]
)
def test_no_communicator_is_created_after_the_kv_cache(results: dict[str, Any], name: str) -> None:
    assert results[name]["grown"] == 0


@pytest.mark.slow
def test_torchrun_launches_a_layout() -> None:
    case = layouts.case("torchrun", layouts.ADDER, layouts.LAYOUTS["TP2"])
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = npus.run(
        2, *torchrun, str(PROGRAM), json.dumps([case]), VLLM_PLUGINS="", OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ranks = npus.results(done.stdout)
    assert len(ranks) == 2
    for rank in ranks:
        assert layouts.compare(layouts.ADDER, "bfloat16", rank["results"])[:2] == (33, 0)
