# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Inputs of drafters in the V2 runner: vLLM's Triton kernels (``gpu/spec_decode/*/speculator.py``)
in PyTorch.

Nothing here synchronizes with the device. Drafters run without graphs of their own.
"""

from typing import Any

import torch

from ascend_platform.kernels.ragged import request_of_token


def prepare_shifted_inputs(
    last_token_indices: torch.Tensor,
    current_draft_step: torch.Tensor,
    input_buffers: Any,
    input_batch: Any,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    max_num_reqs: int,
) -> torch.Tensor:
    """Write the input of EAGLE's and MTP's first pass: that of the target, shifted by one, with
    the sampled token at its end.

    A prompt with further chunks has its next token there. What is after this place belongs to
    rejected draft tokens.
    """
    count = input_batch.num_reqs
    tokens = input_batch.num_tokens
    starts = input_batch.query_start_loc
    last = (starts[1 : count + 1] - 1 - num_rejected).long()
    rows = input_batch.idx_mapping
    sampled = last_sampled.view(-1).index_select(0, rows).to(next_prefill_tokens.dtype)
    following = torch.where(num_sampled > 0, sampled, next_prefill_tokens[0].index_select(0, rows))
    input_buffers.input_ids[: tokens - 1].copy_(input_batch.input_ids[1:tokens])
    input_buffers.input_ids.index_put_((last,), following)
    input_buffers.positions[:tokens].copy_(input_batch.positions[:tokens])
    input_buffers.query_start_loc[: count + 1].copy_(starts[: count + 1])
    input_buffers.query_start_loc[count + 1 :].fill_(tokens)
    input_buffers.seq_lens[:count].copy_(input_batch.seq_lens[:count])
    input_buffers.seq_lens[count:].zero_()
    last_token_indices[:count].copy_(last)
    last_token_indices[count:].zero_()
    current_draft_step.zero_()
    return last_token_indices


def prepare_decode_inputs(
    draft_tokens: torch.Tensor,
    target_seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    input_buffers: Any,
    sample_src_positions: torch.Tensor,
    max_model_len: int,
    max_num_reqs: int,
    advance_draft_positions: bool = True,
) -> None:
    """Write the input of the second pass, in which each request has its first draft token."""
    count = len(draft_tokens)
    starts = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=draft_tokens.device).clamp_(
        max=count
    )
    input_buffers.query_start_loc.copy_(starts)
    input_buffers.input_ids[:count].copy_(draft_tokens)
    sample_src_positions[:count].add_(1)
    lengths = target_seq_lens[:count] - num_rejected[:count]
    if advance_draft_positions:
        input_buffers.positions[:count].add_(1).clamp_(max=max_model_len - 1)
        lengths = (lengths + 1).clamp_(max=max_model_len)
    input_buffers.seq_lens[:count].copy_(lengths)
    input_buffers.seq_lens[count:].zero_()


def update_draft_inputs(
    draft_tokens: torch.Tensor,
    current_draft_step: torch.Tensor,
    hidden_states: torch.Tensor,
    output_draft_tokens: torch.Tensor,
    next_input_hidden_states: torch.Tensor,
    input_buffers: Any,
    sample_src_positions: torch.Tensor,
    num_reqs: int,
    max_model_len: int,
    num_speculative_steps: int,
    advance_draft_positions: bool = True,
) -> None:
    """Keep a pass's draft tokens ``[requests]``, and write the next pass's input, which after the
    last one nothing reads."""
    output_draft_tokens[:num_reqs].index_copy_(
        1, current_draft_step.view(1), draft_tokens[:num_reqs, None]
    )
    input_buffers.input_ids[:num_reqs].copy_(draft_tokens[:num_reqs])
    next_input_hidden_states[:num_reqs].copy_(hidden_states[:num_reqs])
    sample_src_positions[:num_reqs].add_(1)
    if advance_draft_positions:
        input_buffers.positions[:num_reqs].add_(1).clamp_(max=max_model_len - 1)
        input_buffers.seq_lens[:num_reqs].add_(1).clamp_(max=max_model_len)


def prepare_extended_inputs(
    input_buffers: Any,
    input_batch: Any,
    last_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    expanded_input_ids: torch.Tensor,
    expanded_positions: torch.Tensor,
    last_token_indices: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
) -> int:
    """Write the input of a draft model's first pass: the target's accepted tokens, the sampled one,
    then the slots of rejected ones.

    Returns:
        The number of tokens, one per request more than that of the target.
    """
    count, tokens = input_batch.num_reqs, input_batch.num_tokens
    starts = input_batch.query_start_loc[: count + 1].long()
    requests = torch.arange(count + 1, device=starts.device)
    shifted = starts + requests
    num_valid = torch.diff(starts) - num_rejected
    rows = request_of_token(shifted[1:], tokens + count)
    positions = torch.arange(tokens + count, device=starts.device) - shifted.index_select(0, rows)
    sources = (starts.index_select(0, rows) + positions).clamp_(max=tokens - 1)
    own = num_valid.index_select(0, rows)
    sampled = (
        last_sampled.view(-1)
        .index_select(0, input_batch.idx_mapping)
        .to(expanded_input_ids.dtype)
        .index_select(0, rows)
    )
    known = torch.where(
        positions < own, input_batch.input_ids.index_select(0, sources).to(sampled.dtype), 0
    )
    expanded_input_ids[: tokens + count].copy_(torch.where(positions == own, sampled, known))
    first = input_batch.positions.index_select(0, starts[:count])
    torch.add(first.index_select(0, rows), positions, out=expanded_positions[: tokens + count])
    expanded_positions[: tokens + count].clamp_(max=max_model_len - 1)
    last_token_indices[:count].copy_(shifted[:count] + num_valid)
    last_token_indices[count:].zero_()
    input_buffers.query_start_loc[: count + 1].copy_(shifted)
    input_buffers.query_start_loc[count + 1 :].fill_(tokens + count)
    input_buffers.seq_lens[:count].copy_(
        (input_batch.seq_lens[:count] + 1).clamp_(max=max_model_len)
    )
    input_buffers.seq_lens[count:].zero_()
    return int(tokens + count)


def find_ngrams(
    token_ids: torch.Tensor,
    stride: int,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    scratch: torch.Tensor,
    scratch_stride: int,
    max_model_len: int,
    min_n: int,
    max_n: int,
    *_: int,
    **options: Any,
) -> None:
    """Replaces ``_ngram_scan_kernel``: find where each request's last tokens have been before, the
    longest and then the last.

    The result, ``n * (max_model_len + 1) + position + 1`` or 0, is written to the first column of
    ``scratch``.
    """
    tokens = token_ids.index_select(0, idx_mapping)
    lengths = total_len.index_select(0, idx_mapping).long()[:, None]
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    score = torch.zeros_like(lengths)
    is_match = positions < lengths  # of the tokens that follow
    for n in range(1, max_n + 1):
        token = tokens.gather(1, (lengths - n).clamp(min=0))
        is_match = (tokens == token) & is_match & (positions <= lengths - n)
        if n >= min_n:
            before = is_match & (positions < lengths - n) & (lengths >= n)
            found = torch.where(before, n * (max_model_len + 1) + positions + 1, 0).amax(
                1, keepdim=True
            )
            score = torch.maximum(score, found)
        is_match = _shifted(is_match)
    scratch[: len(score)].zero_()
    scratch[: len(score), :1].copy_(score * (num_sampled > 0)[:, None])


def _shifted(is_match: torch.Tensor) -> torch.Tensor:
    """Whether a match begins at the next position, bool ``[requests, positions]``."""
    return torch.nn.functional.pad(is_match[:, 1:], (0, 1))


def take_ngrams(
    token_ids: torch.Tensor,
    stride: int,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    last_sampled: torch.Tensor,
    scratch: torch.Tensor,
    scratch_stride: int,
    drafts: torch.Tensor,
    max_model_len: int,
    num_blocks: int,
    num_tokens: int,
    *_: int,
    **options: Any,
) -> None:
    """Replaces ``_ngram_finalize_kernel``: write the tokens that followed, and the last sampled
    token where there are none."""
    count = len(idx_mapping)
    score = scratch[:count].amax(1, keepdim=True)
    n = (score - 1).clamp(min=0) // (max_model_len + 1)
    start = (score - 1).clamp(min=0) - n * (max_model_len + 1) + n
    positions = start + torch.arange(num_tokens, device=drafts.device)
    is_known = (score > 0) & (positions < total_len.index_select(0, idx_mapping)[:, None])
    elements = torch.add(
        positions.clamp(max=max_model_len - 1), idx_mapping[:, None], alpha=token_ids.stride(0)
    )
    tokens = token_ids.view(-1).index_select(0, elements.view(-1)).view(count, -1).long()
    drafts[:count].copy_(
        torch.where(is_known, tokens, last_sampled.index_select(0, idx_mapping)[:, None])
    )
