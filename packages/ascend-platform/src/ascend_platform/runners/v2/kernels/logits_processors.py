# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Penalties, logit bias, bad words and grammars of the V2 runner: vLLM's Triton kernels in PyTorch.

Logits ``[rows, vocab_size]`` are changed in place, and nothing synchronizes with the device. Each
draft token of a request has a row; ``expanded_local_pos`` is the number of the row in its request.
"""

import functools
from typing import Any

import numpy as np
import torch

from ascend_platform.runners.v2.kernels.buffers import copy_together


@functools.lru_cache(maxsize=4)
def _bits(device: torch.device) -> torch.Tensor:
    """The 32 bits of a mask's int32, the last one the sign; copied to the device once."""
    return torch.tensor([*(1 << bit for bit in range(31)), -(1 << 31)]).int().to(device)


def _unpack(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bool ``[rows, vocab_size]`` of bit masks int32 ``[rows, words]``."""
    return ((masks.unsqueeze(-1) & _bits(masks.device)) != 0).flatten(1)[:, :vocab_size]


def _member(tokens: torch.Tensor, valid: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bool ``[rows, vocab_size]``: whether a token is among the valid ones of ``tokens`` ``[rows,
    columns]``."""
    # The last column is for invalid tokens.
    found = torch.zeros(len(tokens), vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return found.scatter_(1, torch.where(valid, tokens, vocab_size).long(), True)[:, :vocab_size]


def apply_penalties(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
) -> None:
    """Apply penalties for the tokens of the prompt and the output, and for the request's draft
    tokens before that of the row; placeholders of draft tokens are -1."""
    repetition, frequency, presence = (
        each.index_select(0, expanded_idx_mapping)[:, None]
        for each in (repetition_penalty, frequency_penalty, presence_penalty)
    )
    rows = torch.arange(len(logits), device=logits.device)
    before = (rows > (rows - expanded_local_pos)[:, None]) & (rows <= rows[:, None])
    before &= token_ids >= 0
    counts = output_bin_counts.index_select(0, expanded_idx_mapping)
    columns = token_ids.clamp(min=0).long()
    counts.scatter_add_(1, columns.expand(len(rows), -1), before.to(counts.dtype))
    in_output = counts > 0
    seen = in_output | _unpack(
        prompt_bin_mask.index_select(0, expanded_idx_mapping), logits.shape[1]
    )
    scale = torch.where(seen, repetition, 1)
    logits.copy_(
        torch.where(logits > 0, logits / scale, logits * scale)
        - frequency * counts
        - presence * in_output
    )


def bincount(
    expanded_idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    max_prefill_len: int,
) -> None:
    """Write which tokens are in these requests' prompts, as bit masks, and how often each is in
    their output."""
    rows, vocab_size = expanded_idx_mapping, output_bin_counts.shape[1]
    tokens = all_token_ids.index_select(0, rows)[:, :max_prefill_len].long()
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    in_prompt = positions < prompt_len.index_select(0, rows)[:, None]
    in_output = ~in_prompt & (positions < prefill_len.index_select(0, rows)[:, None])
    words = prompt_bin_mask.shape[1]
    found = torch.nn.functional.pad(
        _member(tokens, in_prompt, vocab_size), (0, 32 * words - vocab_size)
    )
    masks = (found.view(len(rows), words, 32) * _bits(tokens.device)).sum(-1, dtype=torch.int32)
    prompt_bin_mask.index_copy_(0, rows, masks)
    counts = torch.zeros(
        len(rows), vocab_size + 1, dtype=output_bin_counts.dtype, device=tokens.device
    )
    counts.scatter_add_(
        1, torch.where(in_output, tokens, vocab_size), torch.ones_like(tokens, dtype=counts.dtype)
    )
    output_bin_counts.index_copy_(0, rows, counts[:, :vocab_size])


def apply_logit_bias(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    pos: torch.Tensor,
    num_allowed_token_ids: torch.Tensor,
    allowed_token_ids: torch.Tensor,
    num_logit_bias: torch.Tensor,
    logit_bias_token_ids: torch.Tensor,
    logit_bias: torch.Tensor,
    min_lens: torch.Tensor,
    num_stop_token_ids: torch.Tensor,
    restore_when_all_masked: torch.Tensor,
    stop_token_ids: torch.Tensor,
    check_all_masked_rows: bool = False,
) -> None:
    """Mask all but the allowed tokens, add biases, and mask stop tokens of answers that are shorter
    than ``min_tokens``.

    If a grammar allows only stop tokens, they stay.
    """
    rows, vocab_size = expanded_idx_mapping, logits.shape[1]

    def listed(
        counts: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = counts.index_select(0, rows)[:, None]
        return (
            count,
            tokens.index_select(0, rows),
            torch.arange(tokens.shape[1], device=tokens.device) < count,
        )

    count, tokens, valid = listed(num_allowed_token_ids, allowed_token_ids)
    logits.masked_fill_(~_member(tokens, valid, vocab_size) & (count > 0), -torch.inf)

    count, tokens, valid = listed(num_logit_bias, logit_bias_token_ids)
    biases = torch.zeros(len(rows), vocab_size + 1, dtype=logits.dtype, device=logits.device)
    given = torch.where(valid, logit_bias.index_select(0, rows), 0).to(logits.dtype)
    logits += biases.scatter_add_(1, torch.where(valid, tokens, vocab_size).long(), given)[
        :, :vocab_size
    ]

    count, tokens, valid = listed(num_stop_token_ids, stop_token_ids)
    is_short = (pos + 1 < min_lens.index_select(0, rows))[:, None]
    stops = _member(tokens, valid & is_short, vocab_size)
    if check_all_masked_rows:
        nothing_left = logits.masked_fill(stops, -torch.inf).amax(-1, keepdim=True) == -torch.inf
        stops &= ~(
            nothing_left
            & (restore_when_all_masked.index_select(0, rows) > 0)[:, None]
            & logits.isfinite()
        )
    logits.masked_fill_(stops, -torch.inf)


def apply_bad_words(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    bad_word_token_ids: torch.Tensor,
    bad_word_offsets: torch.Tensor,
    num_bad_words: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    max_num_bad_words: int,
) -> None:
    """Mask the last token of each bad word whose other tokens are the last ones of the output,
    draft tokens included.

    A request's words are one after another in its row of ``bad_word_token_ids``, and begin at
    ``bad_word_offsets``.
    """
    rows, position = expanded_idx_mapping, expanded_local_pos[:, None]
    tokens = bad_word_token_ids.index_select(0, rows)
    offsets = bad_word_offsets.index_select(0, rows)[:, : max_num_bad_words + 1]
    count = num_bad_words.index_select(0, rows)[:, None]
    positions = torch.arange(tokens.shape[1], dtype=torch.int32, device=logits.device)
    ends = torch.where(
        torch.arange(max_num_bad_words, device=logits.device) < count,
        offsets[:, 1:],
        tokens.shape[1],
    )
    # The AI CPU would search, and sum integers.
    word = (ends[:, None] <= positions[:, None]).float().sum(-1).long()
    is_word = word < count
    word.clamp_(max=max_num_bad_words - 1)
    start, end = offsets.gather(1, word), offsets.gather(1, word + 1)

    prompt = prompt_len.index_select(0, rows)[:, None]
    output_len = total_len.index_select(0, rows)[:, None] - prompt
    # This is the output's token to compare with.
    behind = output_len + position - (end - 1 - start) + (positions - start)
    width = all_token_ids.shape[1]
    elements = (prompt + behind).clamp(0, width - 1) + rows[:, None] * width
    committed = all_token_ids.view(-1)[elements]
    own_rows = torch.arange(len(rows), device=logits.device)[:, None]
    drafted = input_ids[(own_rows - position + behind - output_len + 1).clamp(0, len(rows) - 1)]
    is_last = positions == end - 1
    differs = ~is_last & (tokens != torch.where(behind < output_len, committed, drafted))
    differing = differs.float().cumsum(1)  # Of integers the AI CPU computes it.
    before = torch.where(start > 0, differing.gather(1, (start - 1).clamp(min=0).long()), 0)
    is_long_enough = end - 1 - start <= output_len + position
    banned = is_last & is_word & is_long_enough & (differing == before)
    logits.masked_fill_(_member(tokens, banned, logits.shape[1]), -torch.inf)


def apply_grammar_bitmask(
    worker: Any,
    logits: torch.Tensor,
    batch: Any,
    grammar_req_ids: list[str],
    grammar_bitmask: np.ndarray,
) -> None:
    """Replaces ``StructuredOutputsWorker.apply_grammar_bitmask``: mask the tokens that requests'
    grammars do not allow.

    Masks are int32 ``[requests * mask_stride, words]``; the first of a request are for its
    logits, and the others are not read.
    """
    if not grammar_req_ids:
        return
    number = {req_id: index for index, req_id in enumerate(batch.req_ids)}
    requests = np.array([number[req_id] for req_id in grammar_req_ids])
    rows = batch.cu_num_logits_np[requests, None] + np.arange(worker.mask_stride)
    has_logit = rows < batch.cu_num_logits_np[requests + 1, None]
    positions, masks = copy_together(
        [rows[has_logit].astype(np.int64), grammar_bitmask[has_logit.ravel()]], logits.device
    )
    banned = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    logits.masked_fill_(
        banned.index_copy_(0, positions, ~_unpack(masks, logits.shape[1])), -torch.inf
    )
