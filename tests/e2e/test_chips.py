# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models on an emulated Ascend310P, which has no bfloat16 and a KV cache in FRACTAL_NZ, compared
with Hugging Face transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness.compare import layouts, model_types, quantized
from harness.compare.features import adapters, serving, speculation
from harness.engines import npus
from harness.models import quantize, served_types
from harness.references import dequantized, log_probabilities, multimodal

CHIP = "Ascend310P3"
FRACTAL = ["FractalAttentionImpl"]
DENSE, EMBEDDING, QUANTIZED = "qwen3, heads of 96", "bert embedding", "W8A8"


def bfloat16_checkpoint(path: str) -> None:
    """The dtype in a chat model's checkpoint, for which `--dtype auto` has to select another one on
    this chip."""
    file = Path(path, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))


@pytest.fixture(scope="module")
def quantized_model(tmp_path_factory: pytest.TempPathFactory) -> dequantized.Model:
    """One layer, of int8 weights and static int8 inputs. FRACTAL_NZ takes all matrices but the last,
    because blocks of 32 do not divide 496."""
    directory = tmp_path_factory.mktemp("quantized")
    return quantized.make("dense", "ascend", "float16", directory, layers=1, inner=496)


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory, quantized_model: dequantized.Model
) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("chips")
    collected = {name: model_types.case(name, directory, 1, "auto") for name in (DENSE, EMBEDDING)}
    for case in collected.values():
        bfloat16_checkpoint(case["model"])
    prompts, lengths = layouts.prompts(quantize.COMMON["vocab_size"])
    quantized_case = {
        "name": QUANTIZED,
        "model": str(quantized_model.path),
        "prompts": prompts,
        "lengths": lengths,
        # A tensor in FRACTAL_NZ takes half of the KV cache's memory for a moment.
        "engine": served_types.SMALL | {"gpu_memory_utilization": 0.9},
    }
    return collected | {QUANTIZED: collected[DENSE] | quantized_case}


@pytest.fixture(scope="module")
def results(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return npus.by_name(model_types.run([*cases.values()], ASCEND_EMULATOR_SOC=CHIP))


@pytest.mark.parametrize(
    ("name", "attention", "bound"),
    [(DENSE, FRACTAL, 0.01), (EMBEDDING, served_types.ENCODERS[1], 1e-3)],
)
def test_answers_are_those_of_transformers(
    name: str,
    attention: list[str],
    bound: float,
    cases: dict[str, dict[str, Any]],
    results: dict[str, Any],
) -> None:
    result = results[name]
    assert (result["dtype"], result["kinds"], result["graphs"]) == (
        "torch.float16",
        attention,
        "NONE",
    )
    comparison = model_types.compare(name, cases[name] | {"dtype": "float16"}, result["results"])
    print(f"{name}: {comparison}")
    assert comparison.mean_diff < bound
    assert comparison.max_regret < 2 * comparison.max_diff


def test_answers_of_a_quantized_model(
    quantized_model: dequantized.Model, results: dict[str, Any]
) -> None:
    result = results[QUANTIZED]
    assert (result["dtype"], result["kinds"]) == ("torch.float16", FRACTAL)
    answers = [[answer] for answer in result["results"][: len(result["results"]) // 2]]
    count, _, mean = dequantized.Reference(quantized_model, quantized=True).compare(answers)
    assert count == 33
    assert mean < quantized.BOUND


def test_answers_to_images(tmp_path: Path) -> None:
    """vLLM merges their embeddings by an assignment that this chip's AI CPU does not execute."""
    case = multimodal.case("images", "qwen2_5_vl", tmp_path / "model", 1, "float16", {})
    results = npus.by_name(model_types.run([case], ASCEND_EMULATOR_SOC=CHIP))["images"]["results"]
    logits = multimodal.reference("qwen2_5_vl", tmp_path / "model", "float16")
    comparison = multimodal.compare(logits, results)
    print(f"images: {comparison}")
    assert len(results) == 2 * len(case["prompts"])
    assert comparison["mean"] < 0.03


def test_adapters_and_drafts(tmp_path: Path) -> None:
    (drafts,) = speculation.speculation(tmp_path, ["EAGLE"], 1, "float16")
    results = serving.serve(
        [adapters.lora("LoRA", tmp_path, 1, "float16"), drafts], ASCEND_EMULATOR_SOC=CHIP
    )
    answers = {"steps": results["LoRA"]["steps"][-1:]}
    tokens, mismatches, max_diff = adapters.compare_lora(tmp_path, answers, "float16")
    print(f"LoRA: {tokens} tokens, {mismatches} others, difference max {max_diff:.1e}")
    assert tokens == 120
    assert mismatches <= 1
    assert max_diff < 0.02
    model = log_probabilities.reference(speculation.methods(tmp_path)["EAGLE"][0])
    asked = [serving.greedy(prompt) for prompt in serving.prompts()]
    tokens, mismatches, max_diff = serving.compare(model, asked, results["EAGLE"]["steps"][0])
    print(f"EAGLE: {tokens} tokens, {mismatches} others, difference max {max_diff:.1e}")
    assert (tokens, mismatches) == (144, 0)
    assert max_diff < 0.01
    assert speculation.accepted(results["EAGLE"])[2] > 0
