"""PyTorch in place of the Triton kernels that vLLM's V1 runner launches.

They are called with the kernels' own arguments (``vllm/triton_utils/dispatcher.py``), queue operators on the device
and never wait for it.
"""

import functools

import torch

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
    """Write each token's place in the paged cache, ``block * block_size + offset``; behind the last token, the null block's.

    Replaces ``vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel``.

    Args:
        num_tokens, max_num_tokens: tokens of this step, and the length of ``slot_mapping``.
        query_start_loc: int32 ``[requests + 1]``, where each request's tokens begin.
        positions: int64 ``[num_tokens]``, each token's position in its request.
        block_table: int32 ``[max_requests, block_table_stride]``, each request's blocks.
        slot_mapping: int64 ``[max_num_tokens]``, written.

    Under context parallelism a rank has the tokens whose turn it is, CP_KV_CACHE_INTERLEAVE_SIZE at a time, one after another in
    blocks that hold as many of its own; other ranks' get PAD_ID.
    """
    if TOTAL_CP_WORLD_SIZE > 1:
        turns = positions // CP_KV_CACHE_INTERLEAVE_SIZE
        others = turns % TOTAL_CP_WORLD_SIZE != TOTAL_CP_RANK
        positions = turns // TOTAL_CP_WORLD_SIZE * CP_KV_CACHE_INTERLEAVE_SIZE + positions % CP_KV_CACHE_INTERLEAVE_SIZE
    requests = query_start_loc.shape[0] - 1
    blocks = positions // KV_CACHE_BLOCK_SIZE
    if num_tokens == requests:  # one token each (vLLM schedules no empty request): the decode step
        numbers = block_table[:requests].gather(1, blocks.unsqueeze(1)).squeeze(1)
    else:
        tokens = _arange(max_num_tokens, positions.device)[:num_tokens]
        owners = torch.bucketize(tokens, query_start_loc[1:], right=True)
        numbers = block_table.view(-1).index_select(0, torch.add(blocks, owners, alpha=block_table_stride))
    # block * size + position % size, written as position + (block - position // size) * size
    torch.add(positions, numbers - blocks, alpha=KV_CACHE_BLOCK_SIZE, out=slot_mapping[:num_tokens])
    if TOTAL_CP_WORLD_SIZE > 1:
        slot_mapping[:num_tokens].masked_fill_(others, PAD_ID)
    slot_mapping[num_tokens:].copy_(null_slots(max_num_tokens, KV_CACHE_BLOCK_SIZE, positions.device)[num_tokens:])


@functools.lru_cache(maxsize=4)
def _arange(length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=4)
def _null_slots(length: int, block_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, device=device) % block_size


def null_slots(length: int, block_size: int, device: torch.device) -> torch.Tensor:
    """Places for tokens of no request: those of block 0, which vLLM gives to none; int64 ``[length]``."""
    return _null_slots(-(-length // 4096) * 4096, block_size, device)[:length]


OVERRIDES = {"vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel": slot_mapping_kernel(compute_slot_mapping)}
"""vLLM's kernel, as in ``vllm_overrides.OVERRIDES``, and the function that takes its arguments."""
