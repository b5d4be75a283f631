# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sparse latent attention with int8 keys of the indexer on an emulated Atlas A3, compared with
transformers and with keys in the model's dtype."""

from pathlib import Path
from typing import Any

import pytest
from harness.compare.features import serving
from harness.engines import npus
from harness.models import small as small_models
from harness.references import log_probabilities

CHIP = "Ascend910_93"
BOUNDS = {"auto": 0.02, "int8": 0.1}
CASES = "auto", "int8"
OPERATORS = {"auto": "aclnnLightningIndexer", "int8": "aclnnQuantLightningIndexer"}
ASKED = [serving.greedy(prompt) for prompt in serving.prompts()]


def case(name: str, directory: Path) -> dict[str, Any]:
    options = {"ascend": {"platform": {"index_cache": name}}}
    steps = [["generate", ASKED], ["generate", ASKED], ["count", [ASKED[2]] * 4]]
    model = small_models.target(directory, "GlmMoeDsa")
    return serving.case(name, model, 1, steps, "float16", additional_config=options)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index")


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, Any]:
    cases = [case(name, directory) for name in CASES]
    trace = str(directory / "trace.json")
    return serving.serve(cases, ASCEND_EMULATOR_SOC=CHIP, ASCEND_EMULATOR_TRACE=trace)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(
    results: dict[str, Any], directory: Path, name: str
) -> None:
    model = log_probabilities.reference(
        small_models.target(directory, "GlmMoeDsa"), dtype="float16"
    )
    for answers in results[name]["steps"][:2]:  # The second reads keys of the prefix cache.
        tokens, mismatches, mean = serving.mean_difference(model, ASKED, answers)
        print(f"{name}: {tokens} tokens, {mismatches} others; mean difference {mean:.1e}")
        assert mean < BOUNDS[name]
    launched = results[name]["steps"][2]["names"]
    assert [each for each in OPERATORS.values() if each in launched] == [OPERATORS[name]]


def test_other_chips_are_refused(directory: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"index_cache is int8 .* on Atlas A3, Ascend 950; fix: remove"
    ):
        npus.by_name(serving.serve([case("int8", directory)]))
