# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Engines that are paused, as for an update of their weights, and resumed."""

import sys
from typing import Any

import pytest
from harness import checkout
from harness.engines import npus


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    program = str(checkout.PROGRAMS / "pause_generation.py")
    return npus.by_name(npus.run(1, sys.executable, program, str(checkout.ADDER)))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_of_a_paused_engine(results: dict[str, Any], mode: str) -> None:
    result = results[mode]
    assert result["is paused"]
    assert not result["is paused after"]
    assert result["later"] == result["when paused"]
    assert result["again"] == result["whole"]
    if mode == "abort":
        assert all(reason == "abort" for _, reason in result["paused"])
        for (tokens, _), (whole, _) in zip(result["paused"], result["whole"], strict=True):
            assert tokens == whole[: len(tokens)]
    else:
        assert result["paused"] == result["whole"]
        is_whole = all(count == len(result["whole"][0][0]) for count in result["when paused"])
        assert is_whole == (mode == "wait")
