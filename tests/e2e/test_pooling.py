# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Embeddings and scores of prompts with images and videos, and scores by the logits of two tokens,
compared with Hugging Face transformers."""

from pathlib import Path
from typing import Any

import pytest
from harness.compare import model_types
from harness.engines import npus
from harness.references import pooling


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("pooling")
    return {name: pooling.case(name, directory) for name in pooling.CASES}


@pytest.fixture(scope="module")
def results(cases: dict[str, Any]) -> dict[str, Any]:
    return npus.by_name(model_types.run(list(cases.values())))


@pytest.mark.parametrize("name", pooling.CASES)
def test_results_are_those_of_transformers(
    name: str, cases: dict[str, Any], results: dict[str, Any]
) -> None:
    assert not results[name]["differs"]
    served = results[name]["results"]
    expected = pooling.reference(name, cases[name])
    assert [len(each) for each in served] == [len(each) for each in expected]
    for actual, theirs in zip(served, expected, strict=True):
        assert actual == pytest.approx(theirs, abs=1e-4)
    if len(expected[0]) == 1:  # The scores of different prompts differ.
        assert len({round(score, 3) for (score,) in expected}) > 1
