# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Choices of experts and of tokens that are ties within float32, by which two right computations
differ.

Sums in another order differ by some 1e-6 of themselves. Where the scores of the last choice and of
the next one are as near, the other may be chosen, and with random weights a log-probability changes
by much more. Here the reference takes the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NEAR = 2e-5
"""How near two scores are at most, as a part of the larger one."""

Tie = tuple[float, int, int]
"""How near, in which call of topk, in which of its rows."""


@contextmanager
def exchanged(ties: list[Tie], ties_found: list[Tie]) -> Iterator[None]:
    """Let torch.topk select the next element instead of the last one at some ties, and list all."""
    import torch

    calls, plain, method = 0, torch.topk, torch.Tensor.topk

    def topk(scores: Any, k: int, dim: int = -1, **options: Any) -> Any:
        nonlocal calls
        result = plain(scores, k, dim=dim, **options)
        if k >= scores.shape[-1] or dim not in (-1, scores.dim() - 1):
            return result
        best = plain(scores, k + 1, dim=-1)
        values, places = best.values.view(-1, k + 1), best.indices.view(-1, k + 1)
        near = (values[:, k - 1] - values[:, k]) / values[:, k - 1].abs()
        ties_found.extend(
            (float(near[row]), calls, row) for row in (near < NEAR).nonzero().flatten().tolist()
        )
        for _, _, row in (tie for tie in ties if tie[1] == calls):
            chosen = result[1].view(-1, k)[row]
            chosen[chosen == places[row, k - 1]] = places[row, k]
        calls += 1
        return result

    torch.topk, torch.Tensor.topk = topk, topk  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = plain, method  # type: ignore[method-assign]


def unexplained(
    difference: Callable[[], float], bound: float, max_ties: int = 3
) -> tuple[float, list[Tie]]:
    """How far an answer is from the reference after up to ``most`` exchanges, and which.

    far: computes the reference, and its difference from the answer.
    """
    swapped: list[Tie] = []
    ties: list[Tie] = []
    with exchanged(swapped, ties):
        least = difference()
    while least > bound and len(swapped) < max_ties and ties:
        tried = []
        for tie in sorted(set(ties) - set(swapped)):
            with exchanged([*swapped, tie], []):
                tried.append((difference(), tie))
        if not tried or min(tried)[0] >= least:
            break
        least, tie = min(tried)
        swapped.append(tie)
        ties.clear()
        with exchanged(swapped, ties):
            difference()
    return least, swapped
