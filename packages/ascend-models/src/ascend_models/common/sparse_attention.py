# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention of each token to rows that are selected for it, with or without attention sinks.

The rows are keys and values at once, shared by all heads.
"""

from collections.abc import Sequence

import torch

MAX_ELEMENTS = 1 << 24
"""Upper bound of the elements of the gathered rows in one chunk of tokens (64 MiB in float32)."""


def attend(
    query: torch.Tensor,
    selected: Sequence[tuple[torch.Tensor, torch.Tensor]],
    sinks: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Compute attention in float32.

    Args:
        query: ``[tokens, heads, size]``.
        selected: caches ``[slots, size]``, and int64 ``[tokens, n]``, the slots that each token
            attends to, -1 for none.
        sinks: float32 ``[heads]``, logits that take part in the softmax without a value, or None.
        scale: of the logits of the rows.

    Returns:
        Like query.
    """
    output = torch.empty_like(query)
    width = sum(slots.shape[1] for _, slots in selected)
    chunk = max(1, MAX_ELEMENTS // (width * max(query.shape[1:])))
    for first in range(0, len(query), chunk):
        some = slice(first, first + chunk)
        rows = torch.cat([gather(cache, slots[some]) for cache, slots in selected], 1).float()
        is_absent = torch.cat([slots[some] < 0 for _, slots in selected], 1).unsqueeze(1)
        logits = (query[some].float() @ rows.transpose(1, 2)).mul_(scale)
        logits.masked_fill_(is_absent, -torch.inf)
        if sinks is None:
            weights = logits.softmax(-1)
        else:
            sink = sinks.view(1, -1, 1).expand(len(logits), -1, 1)
            weights = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
        output[some] = (weights @ rows).to(output.dtype)
    return output


def gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows ``[slots, size]`` of a cache, ``[tokens, n, size]`` for slots ``[tokens, n]``; 0 for -1,
    since pages that were freed may hold NaN."""
    return cache[slots.clamp_min(0)].masked_fill((slots < 0).unsqueeze(-1), 0)
