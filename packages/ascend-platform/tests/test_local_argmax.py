# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Greedy tokens from each rank's part of the vocabulary, with equal logits on several ranks, and a
part that is padding."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.engines import npus

PROGRAM = Path(__file__).with_name("argmax_ranks.py")
RANKS, VOCABULARY, ROWS, HIDDEN = 4, 140, 5, 16
"""vLLM pads to 192: 48 tokens a rank, of which the last has none."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    trace = str(tmp_path_factory.mktemp("trace") / "trace.json")
    arguments = map(str, (PROGRAM, RANKS, VOCABULARY, ROWS))
    done = npus.run(RANKS, sys.executable, *arguments, VLLM_PLUGINS="", ASCEND_EMULATOR_TRACE=trace)
    return npus.by_name(done)["argmax"]["ranks"]


def logits() -> torch.Tensor:
    """In float64; each column is there twice, in parts of two ranks."""
    draw, half = torch.Generator().manual_seed(0), VOCABULARY // 2
    weights = (-1 - torch.rand(half, HIDDEN, generator=draw)).bfloat16().double()
    rows = torch.rand(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.1
    return rows.bfloat16().double() @ torch.cat((weights, weights)).T


def test_tokens_are_the_first_of_the_best(ranks: list[dict[str, Any]]) -> None:
    best = logits().max(1).values
    for rank in ranks:
        assert rank["local"] == rank["all"]
        assert max(rank["local"]) < VOCABULARY // 2
        result = logits().gather(1, torch.tensor(rank["local"])[:, None])[:, 0]
        torch.testing.assert_close(result, best, rtol=0.01, atol=0)


def test_ranks_send_pairs_instead_of_logits(ranks: list[dict[str, Any]]) -> None:
    (_, every, _), (_, pairs, _) = ranks[0]["all modelled"], ranks[0]["local modelled"]
    assert every == (RANKS - 1) * ROWS * 48 * 2  # bfloat16
    assert pairs == (RANKS - 1) * ROWS * 2 * 4
