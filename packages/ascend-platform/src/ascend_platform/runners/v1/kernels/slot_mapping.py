# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's slot mapping kernel (``v1/worker/block_table.py``) in PyTorch, and the same on the
host."""

from typing import Any

import numpy as np
import torch

from ascend_platform.kernels import ragged
from ascend_platform.overrides.shims import slot_mapping_kernel


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
    """Replaces ``ComputeSlotMappingKernel.kernel``; the runner fills the slots of padding
    tokens."""
    ranks = ragged.Ranks(TOTAL_CP_WORLD_SIZE, TOTAL_CP_RANK, CP_KV_CACHE_INTERLEAVE_SIZE)
    ragged.write_slots(
        slot_mapping, block_table, query_start_loc, positions, KV_CACHE_BLOCK_SIZE, ranks
    )


def slots_of(table: Any, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Slots of tokens in a BlockTable of vLLM, on the host; see :func:`ragged.slots_on_host`."""
    ranks = ragged.Ranks(table.dcp_world_size, table.dcp_rank, table.cp_kv_cache_interleave_size)
    return ragged.slots_on_host(table.block_table.np, requests, positions, table.block_size, ranks)


kernel = slot_mapping_kernel(compute_slot_mapping)
