# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Inputs of a V2 step, and the requests' states after it: vLLM's Triton kernels
(``gpu/input_batch.py``, ``gpu/cp_utils.py``, ``gpu/mm/rope.py``) in PyTorch.

What depends on the host's knowledge of the step is a method of the current one. Nothing here
synchronizes with the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascend_platform.kernels import ragged
from ascend_platform.kernels.v2.step import Sampled, States, Step, current_step


def _of_step(name: str) -> Callable[..., Any]:
    """A function with vLLM's arguments that calls this method of the current step."""

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(current_step(), name)(*arguments, **named)

    return call


copy_input = _of_step("copy_input")
copy_to_np = _of_step("copy_to_np")
prepare_prefill_inputs = _of_step("prepare_prefill_inputs")
prepare_pos_seq_lens = _of_step("prepare_pos_seq_lens")
combine_sampled_and_draft_tokens = _of_step("combine_sampled_and_draft_tokens")
expand_idx_mapping = _of_step("expand_idx_mapping")
get_num_sampled_and_rejected = _of_step("get_num_sampled_and_rejected")
get_prompt_logprobs_token_ids = _of_step("get_prompt_logprobs_token_ids")


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
    """Replaces ``_post_update_kernel``; ``sampled_tokens`` is ``[requests, columns]``, of which
    ``num_sampled`` are valid.

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
    step = current_step()
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
