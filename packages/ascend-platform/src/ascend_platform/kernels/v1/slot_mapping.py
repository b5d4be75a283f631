# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's slot mapping kernel in PyTorch, and the same on the host.

The kernel takes the Triton kernel's arguments (``vllm/triton_utils/dispatcher.py``) and does not
synchronize with the device.
"""

import functools
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from ascend_platform.compat import slot_mapping_kernel


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the slot mapping, ``block * block_size + offset``; slots of padding tokens are the
    model runner's.

    Replaces ``vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel``. Under context
    parallelism, consecutive runs of CP_KV_CACHE_INTERLEAVE_SIZE tokens go to the ranks in turn. A
    rank stores its own tokens without gaps; other ranks' tokens get PAD_ID.

    Args:
        num_tokens: tokens of this step.
        max_num_tokens: length of ``slot_mapping``.
        query_start_loc: int32 ``[requests + 1]``, first token of each request.
        positions: int64 ``[num_tokens]``, position of each token in its request.
        block_table: int32 ``[max_requests, block_table_stride]``.
        slot_mapping: int64 ``[max_num_tokens]``, written.
    """
    if TOTAL_CP_WORLD_SIZE > 1:
        runs = positions // CP_KV_CACHE_INTERLEAVE_SIZE
        is_remote = runs % TOTAL_CP_WORLD_SIZE != TOTAL_CP_RANK
        positions = (
            runs // TOTAL_CP_WORLD_SIZE * CP_KV_CACHE_INTERLEAVE_SIZE
            + positions % CP_KV_CACHE_INTERLEAVE_SIZE
        )
    requests = query_start_loc.shape[0] - 1
    blocks = positions // KV_CACHE_BLOCK_SIZE
    # One token per request, because vLLM schedules no empty request: a decode step.
    if num_tokens == requests:
        block_numbers = block_table[:requests].gather(1, blocks.unsqueeze(1)).squeeze(1)
    else:
        tokens = _arange(max_num_tokens, positions.device)[:num_tokens]
        token_requests = torch.bucketize(tokens, query_start_loc[1:], right=True)
        block_numbers = block_table.view(-1).index_select(
            0, torch.add(blocks, token_requests, alpha=block_table_stride)
        )
    # The slot `block * block_size + position % block_size` equals `position + (block - position //
    # block_size) * block_size`.
    torch.add(
        positions, block_numbers - blocks, alpha=KV_CACHE_BLOCK_SIZE, out=slot_mapping[:num_tokens]
    )
    if TOTAL_CP_WORLD_SIZE > 1:
        slot_mapping[:num_tokens].masked_fill_(is_remote, PAD_ID)


def slots_of(table: Any, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The same on the host.

    Args:
        table: vLLM's BlockTable.
        requests, positions: int64 ``[num_tokens]``, each token's row in the table and position in
        its request.
    """
    ranks = table.dcp_world_size, table.dcp_rank, table.cp_kv_cache_interleave_size
    return slots_in(table.block_table.np, table.block_size, *ranks, requests, positions)


def slots_in(
    blocks_of: np.ndarray,
    size: int,
    ranks: int,
    rank: int,
    run: int,
    requests: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    """The slots on the host, from the block numbers of each request; the other arguments as for the
    kernel."""
    is_remote = None
    if ranks > 1:
        runs = positions // run
        is_remote = runs % ranks != rank
        positions = runs // ranks * run + positions % run
    blocks = positions // size
    slots = positions + (blocks_of[requests, blocks].astype(np.int64) - blocks) * size
    return slots if is_remote is None else np.where(is_remote, PAD_SLOT_ID, slots)


@functools.lru_cache(maxsize=4)
def _arange(length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=4)
def _null_slots(length: int, block_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, device=device) % block_size


def null_slots(length: int, block_size: int, device: torch.device) -> torch.Tensor:
    """Slots in vLLM's null block (block 0), for padding tokens; int64 ``[length]``."""
    return _null_slots(-(-length // 4096) * 4096, block_size, device)[:length]


OVERRIDES = {
    "vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel": slot_mapping_kernel(
        compute_slot_mapping
    )
}
"""vLLM's kernel, as in ``vllm_overrides.OVERRIDES``, and the function that takes its arguments."""
