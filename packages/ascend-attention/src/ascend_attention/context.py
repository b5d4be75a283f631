# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tokens of requests that are read from the KV cache for a kernel without pages, in chunks of a
bounded number, and the merge of what their attention gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch_npu

from ascend_attention.metadata import BLOCK_SIZE, to_script_list


@dataclass(frozen=True)
class Piece:
    """Tokens ``start`` to ``end`` of a request."""

    request: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """Tokens of some consecutive requests.

    Attributes:
        slots: int64 ``[tokens]``, their KV cache slots.
        rows: of the requests' queries.
        lengths: cumulative query lengths and sequence lengths of the requests, in the kernel's
            form.
    """

    slots: torch.Tensor
    rows: slice
    lengths: tuple[Any, Any]


def cut_context(lengths: list[int], size: int) -> list[list[Piece]]:
    """Cut the requests' contexts into chunks of at most ``size`` tokens, of consecutive requests.

    vLLM orders requests with context before those without, so that no chunk ends early for one
    without.
    """
    chunks: list[list[Piece]] = []
    free = 0
    for request, length in enumerate(lengths):
        start = 0
        while start < length:
            if not free or chunks[-1][-1].request < request - 1:
                chunks.append([])
                free = size
            taken = min(free, length - start)
            chunks[-1].append(Piece(request, start, start + taken))
            start, free = start + taken, free - taken
    return chunks


def chunk_of(pieces: list[Piece], ends: list[int], block_table: torch.Tensor) -> Chunk:
    """The chunk of these pieces.

    Args:
        ends: cumulative numbers of query tokens of all requests.
        block_table: int32 ``[requests, blocks]``.
    """
    starts = [0, *ends]
    first = starts[pieces[0].request]
    query_ends = [ends[piece.request] - first for piece in pieces]
    positions = torch.cat([torch.arange(piece.start, piece.end) for piece in pieces])
    requests = torch.tensor([piece.request for piece in pieces])
    requests = requests.repeat_interleave(
        torch.tensor([piece.end - piece.start for piece in pieces])
    )
    index = torch.stack(
        [requests * block_table.shape[1] + positions // BLOCK_SIZE, positions % BLOCK_SIZE]
    )
    block, place = index.pin_memory().to(block_table.device, non_blocking=True)
    slots = block_table.flatten().index_select(0, block) * BLOCK_SIZE + place
    kv_ends = list(accumulate(piece.end - piece.start for piece in pieces))
    return Chunk(
        slots,
        slice(first, first + query_ends[-1]),
        (to_script_list(query_ends), to_script_list(kv_ends)),
    )


MAX_PARTS = 16
"""Partial outputs that npu_attention_update merges in one call (op-plugin's page)."""


def merge(
    softmax_lse: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial outputs ``[rows, head_size]`` by their log-sum-exp ``[rows]``. For each row one
    of the first 16 parts has a finite one.

    Returns:
        The output and its log-sum-exp, in float32, so that the roundings of several merges do not
        add up.
    """
    softmax_lse, parts = list(softmax_lse), [part.float() for part in parts]
    while len(parts) > 1:
        part, lse = torch_npu.npu_attention_update(softmax_lse[:MAX_PARTS], parts[:MAX_PARTS], 1)
        softmax_lse, parts = [lse, *softmax_lse[MAX_PARTS:]], [part, *parts[MAX_PARTS:]]
    return parts[0], softmax_lse[0]
