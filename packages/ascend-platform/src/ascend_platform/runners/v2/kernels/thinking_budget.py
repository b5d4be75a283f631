# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Thinking budgets of the V2 runner: vLLM's Triton kernels (``gpu/sample/thinking_budget.py``) in
PyTorch, without a wait for the device.

Instead of scanning what is new since the last step, each step scans the tokens of its requests.
"""

from __future__ import annotations

import torch

from ascend_platform.runners.v2.kernels.step import current_step

FORCED = 1.0e9
"""vLLM's logit of a token that is forced."""


def _tokens(
    all_token_ids: torch.Tensor,
    rows: torch.Tensor,
    total: torch.Tensor,
    input_ids: torch.Tensor,
    place: torch.Tensor,
) -> torch.Tensor:
    """Tokens of each logit's request, followed by the draft tokens before the logit, int32 ``[rows,
    columns]``; columns after these are undefined."""
    step, width = current_step(), all_token_ids.shape[1]
    tokens = all_token_ids.index_select(0, rows)[:, : step.num_known_tokens(width)]
    if not step.has_drafts:
        return tokens
    positions = torch.arange(tokens.shape[1], dtype=torch.int32, device=rows.device)
    own = torch.arange(len(rows), dtype=torch.int32, device=rows.device)[:, None]
    drafted = input_ids[(own - place + positions - total + 1).clamp(0, len(rows) - 1)]
    return torch.where(positions < total, tokens, drafted.to(tokens.dtype))


def _last(tokens: torch.Tensor, marker: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Where a marker was last seen before ``ends`` ``[rows, 1]``, float32 ``[rows, 1]``; -1 if it
    was not."""
    count = tokens.shape[1] - len(marker) + 1
    if count <= 0:
        return torch.full_like(ends, -1, dtype=torch.float32)
    # Of integers the AI CPU would compute the maximum.
    starts = torch.arange(count, dtype=torch.float32, device=tokens.device)
    is_there = starts + len(marker) <= ends
    for index in range(len(marker)):
        is_there &= tokens[:, index : index + count] == marker[index]
    return torch.where(is_there, starts, -1).amax(-1, keepdim=True)


def _next_of(tokens: torch.Tensor, marker: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The marker's token that follows those of its tokens with which a request ends, ``[rows,
    1]``."""
    found = torch.zeros_like(ends)
    for count in range(1, len(marker)):
        columns = ends - count + torch.arange(count, dtype=ends.dtype, device=ends.device)
        tail = tokens.gather(1, columns.clamp(min=0).long())
        differing = (tail != marker[:count]).float().sum(-1, keepdim=True)
        found = torch.where((differing == 0) & (ends >= count), count, found)
    return marker[found.long()]


def apply_thinking_budget(
    logits: torch.Tensor,
    req_ids: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    thinking_token_budget: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    cached_last_start: torch.Tensor,
    cached_last_end: torch.Tensor,
    cached_scan_pos: torch.Tensor,
    reasoning_start_token_ids: torch.Tensor,
    natural_reasoning_end_token_ids: torch.Tensor,
    reasoning_end_token_ids: torch.Tensor,
) -> None:
    """Force the end marker of requests that have thought for as many tokens as their budget, which
    is negative if there is none.

    Draft tokens before a logit's count. The cached positions of markers are not used.
    """
    rows, place = expanded_idx_mapping, expanded_local_pos[:, None]
    total = total_len.index_select(0, rows)[:, None]
    budget = thinking_token_budget.index_select(0, rows)[:, None]
    tokens, ends = _tokens(all_token_ids, rows, total, input_ids, place), total + place
    start = _last(tokens, reasoning_start_token_ids, ends)
    thought = ends - start - len(reasoning_start_token_ids)
    is_thinking = (start >= 0) & (start > _last(tokens, natural_reasoning_end_token_ids, ends))
    is_forced = is_thinking & (budget >= 0) & (thought >= budget)
    forced = _next_of(tokens, reasoning_end_token_ids, ends).long()
    kept = logits.gather(1, forced)
    logits.scatter_(1, forced, kept.masked_fill(is_forced, FORCED))
