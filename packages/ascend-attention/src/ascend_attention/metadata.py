# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Metadata of the fused attention for one step, and the constants that it shares between steps."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadata

MASK_SIZE = 2048
"""Rows and columns of the compressed mask that the kernels' sparse modes 3 and 4 take for sequences
of any length."""


@dataclass(frozen=True)
class DCPMetadata:
    """This rank's share of a step under decode context parallelism.

    Attributes:
        cached_lens: context length of each request in this rank's KV cache, on the host; None if no
            rank has context.
        local_token_indices: int64 ``[n]``, the step's tokens whose keys and values this rank
            stores.
        slot_mapping: int64 ``[n]``, their KV cache slots.
    """

    cached_lens: list[int] | None
    local_token_indices: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class ImageMetadata:
    """A step's tokens of images, which attend to each other in both directions.

    Attributes:
        rows: int64 ``[n]``, their rows among the step's query tokens.
        step: metadata with one request for each image, whose last key is the image's last token.
    """

    rows: torch.Tensor
    step: "FusedAttentionMetadata"


@dataclass
class FusedAttentionMetadata(AttentionMetadata):
    """Metadata of one step, the same for all layers of a KV cache group.

    Attributes:
        compute_lengths: computes ``lengths``; with draft tokens it may wait for the device.
        num_tokens: query tokens, including padding tokens in full-graph mode.
        block_table: int32 ``[requests, blocks]``.
        slot_mapping: int64, KV cache slot of each new key; with prefill context parallelism of all
            ranks' tokens, including padding. vLLM replaces it in layers with cross attention.
        mask: int8 ``[2048, 2048]``, 1 above the diagonal.
        softmax_lse: float32 ``[1]``, placeholder for the unused softmax_lse output.
        causal: False for cross attention, where every token attends to all of its request's keys.
        one_query_each: whether each request has one query token, so that a causal mask hides no
            key.
        dcp: this rank's share of the step under decode context parallelism.
        rows: int64 ``[num_tokens]``, row of each query token among ``num_rows``, where the host
            does not know the exact sequence lengths.
        mm_prefix_range: images. vLLM's Gemma 4 sets it to None for layers without.
    """

    compute_lengths: Callable[[], dict[str, Any]]
    num_tokens: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    mask: torch.Tensor
    softmax_lse: torch.Tensor
    causal: bool = True
    one_query_each: bool = False
    dcp: DCPMetadata | None = None
    rows: torch.Tensor | None = None
    num_rows: int = 0
    mm_prefix_range: ImageMetadata | None = None

    @functools.cached_property
    def lengths(self) -> dict[str, Any]:
        """The kernel's host arguments, which a graph updates at each replay
        (``extension.graph_task``).

        ``actual_seq_lengths`` is the cumulative query length of each request; the last entry is the
        number of tokens. ``actual_seq_lengths_kv`` is the sequence length of each request after
        this step's tokens are written.
        """
        return self.compute_lengths()

    @functools.cached_property
    def num_decodes(self) -> int:
        """Number of leading requests with one query token."""
        ends = enumerate(self.lengths["actual_seq_lengths"], 1)
        return next(
            (number - 1 for number, end in ends if end != number),
            len(self.lengths["actual_seq_lengths"]),
        )


def image_spans(
    ranges: dict[int, list[tuple[int, int]]], starts: list[int], seq_lens: list[int]
) -> list[tuple[int, range, int]]:
    """The request, rows and number of visible keys of each image that has tokens in a step.

    Args:
        ranges: first and last positions of each request's images.
        starts: first row of each request, and the number of rows.
        seq_lens: exact for prefills, and not too small for decodes, which are behind all images.
    """
    spans = []
    for request, images in ranges.items():
        # The position of a token is its row plus this offset.
        offset = seq_lens[request] - starts[request + 1]
        for low, high in images:
            first = max(low - offset, starts[request])
            stop = min(high - offset, starts[request + 1] - 1) + 1
            if first < stop:
                spans.append((request, range(first, stop), offset + stop))
    return spans


@functools.cache
def upper_triangle(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The compressed causal mask ``[2048, 2048]``, 1 above the diagonal; one per device
    and dtype."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=dtype).triu_(1).to(device)
