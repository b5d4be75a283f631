# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Inputs of a V2 step, and the requests' states after it: vLLM's Triton kernels
(``gpu/input_batch.py``, ``gpu/cp_utils.py``, ``gpu/mm/rope.py``) in PyTorch.

Functions whose work depends on what the host knows of the step call a method of the step that is
prepared or sampled. Nothing here
synchronizes with the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from ascend_platform.kernels import ragged
from ascend_platform.runners.v2.kernels.buffers import KnownTensor
from ascend_platform.runners.v2.kernels.step import (
    Sampled,
    States,
    Step,
    current_step,
    prepared_step,
)


def copy_input(
    data: Any,
    device: Any = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """async_tensor_h2d in vLLM's ``prepare_inputs``; see :meth:`Step.copy_input`."""
    return current_step().copy_input(data, device, dtype, out)


def copy_to_np(x: torch.Tensor) -> np.ndarray:
    """async_copy_to_np in vLLM's output of a step; what the host knows is not copied."""
    return x.on_host if isinstance(x, KnownTensor) else async_copy_to_np(x)


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """See :meth:`PreparedStep.prepare_prefill_inputs`."""
    prepared_step().prepare_prefill_inputs(
        input_ids,
        next_prefill_tokens,
        idx_mapping,
        query_start_loc,
        all_token_ids,
        prefill_len,
        num_computed_tokens,
    )


def prepare_pos_seq_lens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """See :meth:`PreparedStep.prepare_pos_seq_lens`."""
    prepared_step().prepare_pos_seq_lens(
        idx_mapping, query_start_loc, num_computed_tokens, pos, seq_lens
    )


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_logits: int,
    num_new_sampled_tokens: int = 1,
) -> torch.Tensor | slice:
    """See :meth:`PreparedStep.combine_sampled_and_draft_tokens`."""
    return prepared_step().combine_sampled_and_draft_tokens(
        input_ids,
        idx_mapping,
        last_sampled_tokens,
        query_start_loc,
        seq_lens,
        prefill_len,
        draft_tokens,
        cu_num_logits,
        num_logits,
        num_new_sampled_tokens,
    )


def expand_idx_mapping(
    idx_mapping: torch.Tensor,
    total_num_logits: int,
    cu_num_logits: torch.Tensor,
    max_expand_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :meth:`PreparedStep.expand_idx_mapping`."""
    return prepared_step().expand_idx_mapping(
        idx_mapping, total_num_logits, cu_num_logits, max_expand_len
    )


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :meth:`Step.get_num_sampled_and_rejected`."""
    return current_step().get_num_sampled_and_rejected(
        num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len
    )


def get_prompt_logprobs_token_ids(
    num_tokens: int,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
) -> torch.Tensor:
    """See :meth:`Step.get_prompt_logprobs_token_ids`."""
    return current_step().get_prompt_logprobs_token_ids(
        num_tokens, query_start_loc, idx_mapping, num_computed_tokens, all_token_ids
    )


def _shared(
    create: Callable[..., torch.Tensor], constant: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def call(*arguments: Any, **named: Any) -> torch.Tensor:
        is_shared = len(arguments) == 1 and named.get("dtype") is torch.int32
        if is_shared and current_step().are_constants_shared:
            return constant(arguments[0], named["device"], torch.int32)
        return create(*arguments, **named)

    return call


arange = _shared(torch.arange, ragged.arange)
"""torch.arange for vLLM's ``prepare_inputs``, which numbers the logits in each step without draft
tokens."""
zeros = _shared(torch.zeros, ragged.zeros)
"""torch.zeros for vLLM's ``prepare_inputs``: the number of each logit in its request."""


def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    total_len: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    draft_tokens_out: torch.Tensor | None,
    num_draft_tokens: int,
    **_: Any,
) -> None:
    """Replaces ``_post_update_kernel``; ``sampled_tokens`` is ``[requests, columns]``; the
    first ``num_sampled`` columns are valid.

    Rows with a negative index are skipped. Without ``query_start_loc`` they are those of an earlier
    batch of a pipeline, not of the current step.
    """
    counts = output_bin_counts if current_step().counts_output else None
    last = last_sampled_tokens.view(-1)
    states = States(num_computed_tokens, total_len, last, all_token_ids, counts)
    sampled = Sampled(idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc)
    step = Step() if query_start_loc is None else current_step()
    step.add_sampled(states, sampled)
    if draft_tokens is not None:
        assert draft_tokens_out is not None
        is_valid, rows = (idx_mapping >= 0)[:, None], idx_mapping.clamp(min=0)
        difference = (draft_tokens - draft_tokens_out.index_select(0, rows)) * is_valid
        draft_tokens_out.index_add_(0, rows, difference)


def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor, num_computed_tokens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    """Replaces ``_post_update_num_computed_tokens_kernel``."""
    num_reqs = len(idx_mapping)
    num_computed_tokens.scatter_add_(
        0, idx_mapping, query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    )


def prepare_dcp_local_seq_lens(
    dcp_local_seq_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_reqs: int,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    *,
    num_reqs_padded: int | None = None,
) -> torch.Tensor:
    """Write how many of each request's tokens this rank stores; runs of ``cp_interleave`` tokens go
    to the ranks in turn."""
    lengths, span = seq_lens[:num_reqs], dcp_size * cp_interleave
    rest = (lengths % span - dcp_rank * cp_interleave).clamp(0, cp_interleave)
    torch.add(rest, lengths // span, alpha=cp_interleave, out=dcp_local_seq_lens[:num_reqs])
    dcp_local_seq_lens[num_reqs:].zero_()
    return dcp_local_seq_lens[:num_reqs_padded]


def prepare_rope_positions(
    positions: torch.Tensor,
    positions_stride: int,
    prefill_positions: torch.Tensor,
    stride_of_request: int,
    stride_of_dimension: int,
    prefill_delta: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_DIMS: int,
) -> None:
    """Replaces ``_prepare_rope_positions_kernel``; ``positions`` is int64 ``[dimensions, tokens]``,
    written.

    A prompt's come from ``prefill_positions``; those of generated tokens are the same in all
    dimensions.
    """
    step = prepared_step()
    of_tokens, in_prefill = step.positions_in_prefill(
        idx_mapping, query_start_loc, prefill_lens, num_computed_tokens
    )
    deltas = step.per_token(prefill_delta.index_select(0, idx_mapping), query_start_loc)
    written = (of_tokens + deltas).expand(NUM_DIMS, -1)
    if in_prefill is not None:
        first = step.per_token(idx_mapping * stride_of_request, query_start_loc)
        first = first + of_tokens.clamp(max=stride_of_dimension - 1)
        elements = first + ragged.arange(NUM_DIMS, positions.device)[:, None] * stride_of_dimension
        written = torch.where(in_prefill, prefill_positions.view(-1)[elements].long(), written)
    positions[:, : len(of_tokens)] = written
