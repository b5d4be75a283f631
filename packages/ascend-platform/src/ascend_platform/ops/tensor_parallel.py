# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Vocabulary embedding with tensor parallelism in few operators."""

import functools

import torch
from vllm.model_executor.layers import vocab_parallel_embedding

_native = vocab_parallel_embedding.get_masked_input_and_mask


@functools.wraps(_native)
def get_masked_input_and_mask(
    input_: torch.Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local row of each token id, and whether the id belongs to another rank; rows of those are
    any valid one.

    Only on CUDA torch.compile fuses vLLM's thirteen operators into one kernel. A shard with added
    tokens, or without any, uses vLLM's form.
    """
    if (
        added_vocab_start_index < added_vocab_end_index
        or org_vocab_start_index == org_vocab_end_index
    ):
        ranges = (org_vocab_start_index, org_vocab_end_index, num_org_vocab_padding)
        return _native(input_, *ranges, added_vocab_start_index, added_vocab_end_index)
    local = input_ - org_vocab_start_index
    rows = local.clamp(0, org_vocab_end_index - org_vocab_start_index - 1)
    return rows, rows != local
