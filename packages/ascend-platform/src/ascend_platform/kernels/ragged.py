# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Batches whose requests have different numbers of tokens, one request after the other: indices and
slots of the tokens.

Nothing here synchronizes with the device.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

_GRANULARITY = 4096
"""Shared tensors have a multiple of this length, so that few of them exist."""


class Ranks(NamedTuple):
    """Context parallelism: consecutive runs of ``interleave`` tokens go to the ranks in turn."""

    size: int = 1
    rank: int = 0
    interleave: int = 1


def request_of_token(ends: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Index of the request of each token, int64 ``[tokens]``; ``len(ends)`` for padding tokens.

    Comparisons are counted in float32, because the AI CPU computes searches and integer sums.

    Args:
        ends: ``[requests]``, the cumulative number of tokens.
        tokens: how many, or their indices where the caller has a tensor of them.
    """
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, dtype=ends.dtype, device=ends.device)
    return (tokens[:, None] >= ends).float().sum(-1).long()


@functools.lru_cache(maxsize=16)
def _padded(name: str, length: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange if name == "arange" else torch.zeros)(length, dtype=dtype, device=device)


def _shared(name: str, length: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return _padded(name, -(-length // _GRANULARITY) * _GRANULARITY, device, dtype)[:length]


def arange(length: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """``torch.arange`` in memory that its users share, and only read."""
    return _shared("arange", length, device, dtype)


def zeros(length: int, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """``torch.zeros`` in memory that its users share, and only read."""
    return _shared("zeros", length, device, dtype)


@functools.lru_cache(maxsize=4)
def _null_slots(length: int, block_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, device=device) % block_size


def null_slots(length: int, block_size: int, device: torch.device) -> torch.Tensor:
    """Slots in vLLM's null block (block 0), for padding tokens; int64 ``[length]``."""
    padded = -(-length // _GRANULARITY) * _GRANULARITY
    return _null_slots(padded, block_size, device)[:length]


def fill_null_slots(slots: torch.Tensor, first: int, block_size: int) -> None:
    """Write slots of the null block to ``slots`` from token ``first`` on."""
    if first < len(slots):
        slots[first:].copy_(null_slots(len(slots), block_size, slots.device)[first:])


def write_slots(
    slots: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    ranks: Ranks,
) -> None:
    """Write each token's slot, ``block * block_size + offset``, and -1 for tokens of other ranks.

    A rank stores its tokens without gaps.

    Args:
        slots: int64, at least ``[tokens]``; those after the tokens are left as they are.
        block_table: int32 ``[at least requests, blocks]``.
        query_start_loc: int32 ``[requests + 1]``, first token of each request.
        positions: int64 ``[tokens]``, position of each token in its request.
    """
    num_tokens, num_reqs = len(positions), len(query_start_loc) - 1
    if ranks.size > 1:
        runs = positions // ranks.interleave
        is_remote = runs % ranks.size != ranks.rank
        positions = runs // ranks.size * ranks.interleave + positions % ranks.interleave
    blocks = positions // block_size
    # vLLM schedules no empty request, so that this is a decode step with one token each.
    if num_tokens == num_reqs:
        numbers = block_table[:num_reqs].gather(1, blocks.unsqueeze(1)).squeeze(1)
    else:
        tokens = arange(num_tokens, positions.device, torch.int32)
        requests = request_of_token(query_start_loc[1:], tokens)
        elements = torch.add(blocks, requests, alpha=block_table.stride(0))
        numbers = block_table.view(-1).index_select(0, elements)
    # This is block * size + position % size.
    torch.add(positions, numbers - blocks, alpha=block_size, out=slots[:num_tokens])
    if ranks.size > 1:
        slots[:num_tokens].masked_fill_(is_remote, PAD_SLOT_ID)


def slots_on_host(
    block_table: np.ndarray,
    requests: np.ndarray,
    positions: np.ndarray,
    block_size: int,
    ranks: Ranks,
) -> np.ndarray:
    """The slots that :func:`write_slots` writes, int64 ``[tokens]``.

    Args:
        block_table: ``[at least requests, blocks]``.
        requests: int64 ``[tokens]``, each token's row in the table.
        positions: int64 ``[tokens]``, each token's position in its request.
    """
    is_remote = None
    if ranks.size > 1:
        runs = positions // ranks.interleave
        is_remote = runs % ranks.size != ranks.rank
        positions = runs // ranks.size * ranks.interleave + positions % ranks.interleave
    blocks = positions // block_size
    slots = positions + (block_table[requests, blocks].astype(np.int64) - blocks) * block_size
    return slots if is_remote is None else np.where(is_remote, PAD_SLOT_ID, slots)
