# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Vision-language models through vLLM's engine, compared with Hugging Face transformers.

Prompts with images of several sizes, one with more tokens than a step has, and with a video, each
twice, the second time from the prefix cache except with drafts. `tools/check architectures` compares more models.
"""

from pathlib import Path
from typing import Any

import pytest
from harness import model_types, multimodal, npus

MTP: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
MTP |= {"enable_prefix_caching": False}
# Name: (model type, NPUs, dtype, options, largest mean difference).
CASES: dict[str, tuple[str, int, str, dict[str, Any], float]] = {
    "qwen2.5-vl": ("qwen2_5_vl", 2, "bfloat16", {}, 0.03),
    "qwen3-vl-moe": ("qwen3_vl_moe", 1, "bfloat16", {}, 0.03),
    "qwen3.5": ("qwen3_5", 1, "float32", MTP, 1e-4),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("multimodal")
    return {
        name: multimodal.case(name, kind, directory / name, ranks, dtype, engine)
        for name, (kind, ranks, dtype, engine, _) in CASES.items()
    }


@pytest.fixture(scope="module")
def results(cases: dict[str, Any]) -> dict[str, Any]:
    return npus.by_name(model_types.run(list(cases.values())))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(
    name: str, cases: dict[str, Any], results: dict[str, Any]
) -> None:
    kind, _, dtype, _, bound = CASES[name]
    assert results[name]["alike"], "ranks have other answers"
    logits = multimodal.reference(kind, Path(cases[name]["model"]), dtype)
    found = multimodal.compare(logits, results[name]["results"])
    print(f"{name}: {found}")
    assert len(results[name]["results"]) == 2 * len(cases[name]["prompts"])
    assert found["mean"] < bound
