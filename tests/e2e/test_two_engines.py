# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Two engines of equal models in one process (VLLM_ENABLE_V1_MULTIPROCESSING=0), each with graphs
of its own."""

import sys
from typing import Any

import pytest
from harness import checkout
from harness.engines import npus


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    command = [sys.executable, str(checkout.PROGRAMS / "serve_two_engines.py"), str(checkout.ADDER)]
    done = npus.run(1, *command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (record,) = npus.results(done.stdout)
    return record


@pytest.mark.parametrize("stage", ["both", "first asleep", "first awake", "second asleep"])
def test_tokens_are_those_of_a_single_engine(result: dict[str, Any], stage: str) -> None:
    """Also while the other engine sleeps, whose rotary tables and graphs are freed."""
    assert all(tokens == result["alone"] for tokens in result[stage])
    assert len({tuple(tokens) for tokens in result["alone"]}) == len(result["alone"])


def test_graphs_are_freed_with_their_engine(result: dict[str, Any]) -> None:
    assert result["graphs"] > 0
    assert result["graphs left"] == 0
