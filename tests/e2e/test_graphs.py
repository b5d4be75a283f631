# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Graph modes: tokens, one launch a decode step, and fewer captured sizes, or none, where streams
are short."""

from typing import Any

import pytest
from harness.compare.graphs import check, serve


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    few, none = ({"mode": "FULL", "ranks": 1, "streams": streams} for streams in (40, 34))
    cases = {"mode": "FULL_AND_PIECEWISE", "ranks": 2}, few, none
    return serve(tmp_path_factory.mktemp("trace") / "trace.json", *cases)


@pytest.fixture(scope="module")
def two_ranks(results: list[dict[str, Any]]) -> dict[str, Any]:
    return results[0]


def test_tokens_with_tensor_parallelism(two_ranks: dict[str, Any]) -> None:
    """Collectives are in the graphs; prefills run piecewise, decodes as one graph, both padded to
    the sizes captured."""
    assert two_ranks["mode"] == "FULL_AND_PIECEWISE"
    assert two_ranks["captured"] == {
        "PIECEWISE": [1, 2, 4, 8, 16, 24, 32],
        "FULL": [1, 2, 4, 8, 16],
    }
    check(two_ranks)


def test_a_decode_step_is_one_launch(two_ranks: dict[str, Any]) -> None:
    prefill, *decodes, finished = two_ranks["launched"]
    assert prefill == 4  # The attentions of three layers split the model into four pieces.
    assert decodes == [1] * 5
    assert finished == 0


def test_the_kv_cache_leaves_memory_for_graphs(two_ranks: dict[str, Any]) -> None:
    """At least 1 MiB for each graph except the first of its mode: vLLM's own minimum."""
    assert two_ranks["left"] >= 10 << 20


def test_fewer_sizes_are_captured_when_streams_are_short(results: list[dict[str, Any]]) -> None:
    """Full graphs for prefill and decode, with too few streams for all requested sizes."""
    result = results[1]
    assert result["captured"] == {"PIECEWISE": [], "FULL": [1, 8, 32]}
    assert "capturing graphs of 3 of 7 sizes (1, 8, 32 tokens): " in result["log"]
    check(result)


def test_steps_run_eagerly_without_streams_for_graphs(results: list[dict[str, Any]]) -> None:
    """The first capture is the one that estimates the graphs' memory."""
    result = results[2]
    assert result["captured"] == {"PIECEWISE": [], "FULL": []}
    assert "graphs disabled: " in result["log"]
    assert "; steps run eagerly. fix: " in result["log"]
    check(result)
