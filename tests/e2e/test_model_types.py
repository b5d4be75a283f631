# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models by attention type and task through vLLM's engine, compared with Hugging Face transformers.

Here are some that between them use each attention; `tools/check model_types` runs all, each with and
without tensor parallelism.
"""

from pathlib import Path
from typing import Any

import pytest
from harness.compare import model_types
from harness.engines import npus
from harness.models import served_types

# Name: (NPUs, number of tokens or values, the largest mean difference).
CASES = {
    "gemma3, windows between": (2, 82, 0.02),
    "granite, sinks and windows": (1, 82, 0.03),
    "qwen3, multi-head, heads of 96": (2, 82, 0.03),
    "deepseek-v3, yarn": (1, 82, 0.04),
    "openpangu, sandwich norms": (1, 82, 0.08),
    # Transformers in bfloat16 differs from float32 by 0.014.
    "deepseek-v3, mla_prolog": (2, 82, 0.02),
    "glm-5, shared selections": (1, 82, 0.15),
    # Transformers in bfloat16 differs from float32 by 0.06.
    "qwen3-next, gated delta net": (1, 82, 0.1),
    "bert cross-encoder": (1, 2, 5e-3),
    "idefics3, an image": (1, 30, 0.03),
    "paddleocr-vl, an image": (1, 30, 0.03),
    "whisper, a sound": (1, 36, 0.02),
}

FLOAT16 = {"glm-5, shared selections"}
"""Its layers attend to 32 of up to 400 tokens, and roundings change some: transformers itself is
0.08 off, in bfloat16 0.21."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("kinds")
    return {
        name: model_types.case(name, directory, ranks, "float16" if name in FLOAT16 else "bfloat16")
        for name, (ranks, _, _) in CASES.items()
    }


@pytest.fixture(scope="module")
def results(cases: dict[str, Any]) -> dict[str, Any]:
    return npus.by_name(model_types.run(list(cases.values())))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(
    name: str, cases: dict[str, Any], results: dict[str, Any]
) -> None:
    _, numbers, bound = CASES[name]
    result = results[name]
    assert not result["differs"]
    assert result["kinds"] == served_types.KINDS[name].served_by[0]
    comparison = model_types.compare(name, cases[name], result["results"])
    print(f"{name}: {comparison}")
    assert comparison.num_compared == numbers
    assert comparison.mean_diff < bound
    # Greedy: the chosen token is the best one up to the difference.
    assert comparison.max_regret < 2 * comparison.max_diff


def test_sliding_window_layers_have_their_own_kv_cache_group(results: dict[str, Any]) -> None:
    for name in ("gemma3, windows between", "granite, sinks and windows"):
        assert (results[name]["groups"], results[name]["graphs"]) == (2, "FULL_DECODE_ONLY")
    assert (results["whisper, a sound"]["groups"], results["whisper, a sound"]["graphs"]) == (
        2,
        "NONE",
    )
