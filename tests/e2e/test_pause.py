# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Engines that are paused, as for an update of their weights, and resumed."""

import sys
from typing import Any

import pytest
from harness import checkout, npus


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    program = str(checkout.PROGRAMS / "pause_generation.py")
    return npus.by_name(npus.run(1, sys.executable, program, str(checkout.ADDER)))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_of_a_paused_engine(results: dict[str, Any], mode: str) -> None:
    found = results[mode]
    assert found["is paused"]
    assert not found["is paused after"]
    assert found["later"] == found["when paused"]
    assert found["again"] == found["whole"]
    if mode == "abort":
        assert all(reason == "abort" for _, reason in found["paused"])
        for (tokens, _), (whole, _) in zip(found["paused"], found["whole"], strict=True):
            assert tokens == whole[: len(tokens)]
    else:
        assert found["paused"] == found["whole"]
        is_whole = all(count == len(found["whole"][0][0]) for count in found["when paused"])
        assert is_whole == (mode == "wait")
