# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""PyTorch implementations of the Triton kernels of vLLM's drafters, and sequence lengths on the
host for drafters.

The functions take the kernels' arguments in the kernels' order
(``vllm/triton_utils/dispatcher.py``), with the meaning of ``vllm/v1/spec_decode/utils.py``. They
compute a whole batch at once, without synchronizing with the device, and no shape depends on which
tokens are accepted.
"""

import functools
from contextvars import ContextVar
from typing import Any

import torch
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from ascend_platform.attention import length_bounds
from ascend_platform.kernels.ragged import fill_null_slots, null_slots, request_of_token


def eagle_step(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    seq_lens: torch.Tensor,
    out_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    pad_slot_id: int,
    batch_size: int | None = None,
) -> None:
    """Advance each request by one token: update positions, slot mapping and seq_lens in place.

    Args:
        positions: int64 ``[batch_size]``.
        out_positions: int64 ``[batch_size]``; a position beyond ``max_model_len`` becomes 0.
        block_table: int32 ``[batch_size, n_blocks_per_req]``.
        seq_lens: int32 ``[batch_size]``.
        out_slot_mapping: int64. Where Triton's kernel writes ``pad_slot_id``, for padding and for
            positions beyond ``max_model_len``, it gets slots of the null block.
    """
    count = positions.shape[0]
    next_positions = positions + 1
    exceeds = next_positions >= max_model_len
    next_positions = next_positions.masked_fill(exceeds, 0)
    block = (next_positions // block_size).clamp_max(n_blocks_per_req - 1)
    slot_mapping = (
        block_table[:count].gather(1, block.unsqueeze(1)).squeeze(1) * block_size
        + next_positions % block_size
    )
    null = null_slots(count, block_size, positions.device)
    out_slot_mapping[:count] = torch.where(exceeds, null, slot_mapping)
    fill_null_slots(out_slot_mapping, count, block_size)
    seq_lens[:count] = torch.where(exceeds, 1, seq_lens[:count] + 1).clamp_max(max_model_len)
    out_positions[:count] = next_positions


def eagle_prepare_inputs(
    cu_num_draft_tokens: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    query_start_loc: torch.Tensor,
    token_indices_to_sample: torch.Tensor,
    num_rejected_tokens: torch.Tensor,
    num_reqs: int,
) -> None:
    """Write the number of rejected draft tokens and the index of the last valid token of each
    request, ``[num_reqs]``.

    ``cu_num_draft_tokens`` is int32 ``[num_reqs]``, the cumulative number of draft tokens.
    """
    counts = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1))
    rejected = torch.where(counts > 0, counts + 1 - valid_sampled_tokens_count, 0)
    num_rejected_tokens.copy_(rejected)
    token_indices_to_sample.copy_(query_start_loc[1 : num_reqs + 1] - 1 - rejected)


def eagle_prepare_next_token(
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    next_token_ids: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
    stride: int,
    block_size: int,
) -> None:
    """Write the number of valid sampled tokens and the last of them, or the backup token without
    any, ``[num_reqs]``.

    Args:
        sampled_token_ids: ``[num_reqs, num_sampled_tokens_per_req]``, -1 for rejected tokens.
        discard_request_mask: bool ``[num_reqs]``, requests without a valid token.
    """
    valid = (
        (sampled_token_ids != -1)
        & (sampled_token_ids < vocab_size)
        & ~discard_request_mask[:num_reqs].unsqueeze(1)
    )
    columns = torch.arange(num_sampled_tokens_per_req, device=sampled_token_ids.device)
    last = torch.where(valid, columns, -1).amax(1, keepdim=True)
    tokens = sampled_token_ids.gather(1, last.clamp_min(0)).squeeze(1).to(next_token_ids.dtype)
    backup = backup_next_token_ids[:num_reqs].to(next_token_ids.dtype)
    next_token_ids.copy_(torch.where(last.squeeze(1) >= 0, tokens, backup))
    valid_sampled_tokens_count.copy_(valid.sum(1))


def expand_eagle_inputs(
    target_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_is_rejected: torch.Tensor,
    out_is_masked: torch.Tensor,
    out_new_token_indices: torch.Tensor,
    out_hidden_state_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_end_loc: torch.Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    total_input_tokens: int,
    num_slots: int,
    shift_input_ids: bool,
    block_size: int,
) -> None:
    """Build a drafter's input of each request: valid tokens, next token, ``num_slots - 1`` parallel
    drafting tokens, padding.

    There are as many padding tokens as rejected tokens.

    Args:
        target_token_ids: ``[total_input_tokens]``, the tokens of the target model.
        target_positions: ``[total_input_tokens]``, their positions.
        query_start_loc: ``[num_reqs + 1]``, first token of each request.
        query_end_loc: ``[num_reqs]``, last valid token of each request.
        out_input_ids: the drafter's tokens.
        out_positions: the drafter's positions.
        out_is_rejected: mask of padding tokens.
        out_is_masked: mask of parallel drafting tokens.
        out_new_token_indices: ``[num_reqs * num_slots]``, indices of the next token and the
            parallel drafting tokens.
        out_hidden_state_mapping: ``[total_input_tokens]``, output index of each input token's
            hidden state; written with ``shift_input_ids``.
        shift_input_ids: drop each request's first token, for drafters that take the previous
            token's hidden state.
    """
    num_reqs, device = query_end_loc.shape[0], target_token_ids.device
    starts, ends = query_start_loc[:num_reqs].long(), query_end_loc.long()
    added_slots = num_slots - 1 if shift_input_ids else num_slots
    valid = ends - starts + (0 if shift_input_ids else 1)
    out_starts = starts + torch.arange(num_reqs, device=device) * added_slots
    out = torch.arange(total_input_tokens + num_reqs * added_slots, device=device)
    request = request_of_token(out_starts[1:], out)
    offset, count = out - out_starts[request], valid[request]
    padding = offset >= count + num_slots
    parallel = (offset > count) & ~padding
    source = (starts[request] + offset + int(shift_input_ids)).clamp_max(total_input_tokens - 1)
    dtype = out_input_ids.dtype
    input_ids = torch.where(
        offset == count, next_token_ids[request].to(dtype), target_token_ids[source].to(dtype)
    )
    input_ids = input_ids.masked_fill(parallel, parallel_drafting_token_id).masked_fill(
        padding, padding_token_id
    )
    written = slice(out.shape[0])
    out_input_ids[written] = input_ids
    out_is_rejected[written] = padding
    out_is_masked[written] = parallel
    out_positions[written] = (target_positions[starts][request] + offset).masked_fill(padding, 0)
    out_new_token_indices.copy_(
        ((out_starts + valid).unsqueeze(1) + torch.arange(num_slots, device=device)).flatten()
    )
    if shift_input_ids:
        indices = torch.arange(total_input_tokens, device=device)
        requests = request_of_token(starts[1:], indices)
        out_hidden_state_mapping[:total_input_tokens] = indices + requests * added_slots


rejected_in_step: ContextVar[length_bounds.Rejected | None] = ContextVar(
    "draft tokens rejected in this step", default=None
)
"""Set while a drafter runs, unless no request of the step had draft tokens."""


# In vllm/v1/spec_decode/llm_base_proposer.py added and rejected tokens change seq_lens on the device
# only, and rejected and padding tokens have slot -1. The attention kernels need sequence lengths on
# the host and valid slots.
_build: Any = SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata
_get_slots: Any = SpecDecodeBaseProposer._get_slot_mapping
_extend: Any = llm_base_proposer.extend_all_queries_by_N


@functools.wraps(_build)
def build_with_lengths(self: Any, common_attn_metadata: Any, draft_index: int = 0) -> Any:
    slots = common_attn_metadata.slot_mapping
    padding = null_slots(len(slots), self.vllm_config.cache_config.block_size, slots.device)
    common_attn_metadata.slot_mapping = torch.where(slots < 0, padding, slots)
    # The pass of the first draft token still has the rejected tokens in its queries.
    with length_bounds.subtract_rejected(rejected_in_step.get() if draft_index else None):
        return _build(self, common_attn_metadata, draft_index)


@functools.wraps(_get_slots)
def get_slots_of_null_block(
    self: Any, num_tokens: int, slot_mapping: torch.Tensor | None = None
) -> Any:
    # Latent attention also writes the keys of padding tokens.
    if slot_mapping is not None and len(slot_mapping) < num_tokens:
        block_size = self.vllm_config.cache_config.block_size
        padding = null_slots(num_tokens, block_size, slot_mapping.device)
        slot_mapping = torch.cat([slot_mapping, padding[len(slot_mapping) :]])
    return _get_slots(self, num_tokens, slot_mapping)


@functools.wraps(_extend)
def extend_with_lengths(common_attn_metadata: Any, N: int, *args: Any, **kwargs: Any) -> Any:
    extended = _extend(common_attn_metadata, N, *args, **kwargs)
    lengths = common_attn_metadata.seq_lens_cpu_upper_bound
    return extended.replace(seq_lens_cpu_upper_bound=lengths + N)
