# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantized models served by vLLM, compared with transformers with dequantized weights.

Here are four models, whose layers have different schemes; `tools/check quantized` runs all, and
breaks each scheme once. FP8 models have experts, and a dense first layer; gpt-oss has biases,
clipped SwiGLU and sinks.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import checkout
from harness.compare import layouts, quantized
from harness.engines import npus
from harness.models import fp8, gpt_oss, hybrid, served_types
from harness.references import dequantized

pytestmark = pytest.mark.usefixtures("one_thread")

PROGRAM = checkout.PROGRAMS / "serve_layout.py"
# with torch.compile's fusions
TP2 = layouts.OF_EXPERTS["TP2"] | {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
EAGER = layouts.OF_EXPERTS["TP2"]
TP1 = layouts.OF_EXPERTS["TP1"]
# Name: (model, format, dtype, int8 KV cache, engine, backend).
CASES = {
    "linear layers with biases, ModelSlim, int8 KV cache, TP2": (
        "dense",
        "ascend",
        "float16",
        True,
        TP2,
        "FusedAttentionImpl",
    ),
    "experts, compressed-tensors": (
        "experts",
        "compressed-tensors",
        "bfloat16",
        False,
        TP1,
        "QuantizedExperts",
    ),
    "linear layers with biases, GPTQ by layer, TP2": (
        "dense",
        "gptq",
        "bfloat16",
        False,
        EAGER,
        "FusedAttentionImpl",
    ),
    "experts, AWQ, TP2": ("experts", "awq", "float16", False, EAGER, "QuantizedExperts"),
}
CASES["latents by mla_prolog, ModelSlim"] = (
    "latent, mla_prolog",
    "ascend",
    "bfloat16",
    False,
    TP1 | served_types.MLA_PROLOG | {"gpu_memory_utilization": 0.5},
    "npu_mla_prolog_v3",
)
INT8 = {"additional_config": {"ascend": {"platform": {"fp8": "W8A8_DYNAMIC"}}}}
# Name: (format, dtype, engine, backend).
FP8_CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "FP8 blocks, TP2": ("fp8", "float32", EAGER, "DequantizedExperts"),
    "FP8 blocks of a gated delta net, TP2": (
        "fp8, gated delta net",
        "float32",
        EAGER,
        "DequantizedExperts",
    ),
    "FP8 blocks to W8A8_DYNAMIC, TP2": (
        "fp8, all experts",
        "bfloat16",
        EAGER | INT8,
        "RequantizedExperts",
    ),
    "FP8 by block, channel and matrix, compressed-tensors": (
        "compressed-tensors",
        "bfloat16",
        TP1,
        "DequantizedExperts",
    ),
    "gpt-oss, MXFP4, TP2": ("mxfp4", "float32", EAGER, "ExpandedExperts"),
    "gpt-oss, MXFP4, in full graphs": ("mxfp4", "bfloat16", TP1, "SinkAttentionImpl"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dequantized.Model]:
    directory = tmp_path_factory.mktemp("models")
    return {
        name: quantized.make(kind, form, dtype, directory, cache=cache)
        for name, (kind, form, dtype, cache, _, _) in CASES.items()
    }


@pytest.fixture(scope="module")
def fp8_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The models in FP8, and dequantized."""
    directory = tmp_path_factory.mktemp("fp8")
    paths = {form: fp8.make(directory, form) for form in ("fp8", "compressed-tensors")} | {
        "mxfp4": gpt_oss.make(directory)
    }
    # Every token goes to every expert, because int8 inputs of a router change which experts are
    # selected, and so all later layers.
    delta = hybrid.DELTA | {
        "shared_expert_intermediate_size": 192,
        "layer_types": hybrid.LINEAR,
        "num_hidden_layers": 4,
    }
    paths["fp8, gated delta net"] = fp8.make(directory / "delta", "fp8", "Qwen3Next", **delta)
    return paths | {
        "fp8, all experts": fp8.make(
            directory / "all", "fp8", num_experts_per_tok=fp8.COMMON["num_experts"]
        )
    }


@pytest.fixture(scope="module")
def results(
    models: dict[str, dequantized.Model], fp8_models: dict[str, tuple[Path, Path]]
) -> dict[str, Any]:
    cases = [quantized.case(name, model, CASES[name][4]) for name, model in models.items()]
    for name, (form, dtype, engine, _) in FP8_CASES.items():
        cases.append(layouts.case(name, fp8_models[form][0], engine, dtype=dtype))
    done = npus.run(
        2, sys.executable, str(PROGRAM), json.dumps(cases), VLLM_PLUGINS="", OMP_NUM_THREADS="1"
    )
    return npus.by_name(done)


def test_int8_kv_cache_is_served_in_full_graphs(results: dict[str, Any]) -> None:
    name = next(iter(CASES))
    assert "int8 KV cache" in name
    assert results[name]["mode"] == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_those_of_dequantized_weights(
    results: dict[str, Any], models: dict[str, dequantized.Model], name: str
) -> None:
    assert CASES[name][5] in results[name]["kinds"]
    answers = results[name]["results"]
    count, max_diff, mean = dequantized.Reference(models[name], quantized=False).compare(answers)
    alike = dequantized.Reference(models[name], quantized=True)
    _, most_alike, mean_alike = alike.compare(answers)
    print(
        f"{name}: {count} tokens, average {mean:.4f} at most {max_diff:.4f}; with inputs quantized"
        f" {mean_alike:.4f}, {most_alike:.4f}"
    )
    assert count == 33
    assert mean < quantized.FLOAT_BOUND
    assert mean_alike < quantized.BOUND
    # The bound detects errors: scales of one scheme that are a tenth too large exceed it.
    matrices = models[name].written.matrices
    fewest = min(matrix.spec.bits for matrix in matrices.values())
    scheme, matrix = next(
        (name, matrix) for name, matrix in reversed(matrices.items()) if matrix.spec.bits == fewest
    )
    for other, its in models[name].written.matrices.items():
        if its.spec == matrix.spec:
            alike.put(other, dequantized.wrong_scale(its))
    assert alike.compare(answers)[2] > quantized.BOUND, scheme


@pytest.mark.parametrize("name", FP8_CASES)
def test_converted_weights_are_the_dequantized_ones(
    results: dict[str, Any], fp8_models: dict[str, tuple[Path, Path]], name: str
) -> None:
    form, dtype, _, kind = FP8_CASES[name]
    assert kind in results[name]["kinds"]
    count, mismatches, max_diff, mean = layouts.compare(
        fp8_models[form][1], dtype, results[name]["results"]
    )
    print(f"{name}: {count} tokens, average {mean:.6f} at most {max_diff:.6f}")
    assert count == 33
    if dtype == "float32":
        assert mismatches == 0
        assert max_diff < 1e-4
    else:
        assert mean < (quantized.BOUND if kind == "DequantizedExperts" else quantized.FLOAT_BOUND)
