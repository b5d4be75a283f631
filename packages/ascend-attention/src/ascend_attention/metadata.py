# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Metadata of the fused attention for one step, and the constants that it shares between steps."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadata

BLOCK_SIZE = 128
"""Tokens per block: supported by the kernel for prefill and decode, and recommended by its
documentation."""

ALL_TOKENS = 2**31 - 1
"""The kernel's default for tokens before and after."""

MAX_DECODE_KEYS = 262144
"""Keys of a request with one query token that the kernels take (op-plugin's page of
npu_fused_infer_attention_score)."""

KEY_LENGTHS = ("actual_seq_lengths_kv", "actual_seq_kvlen")
"""The names that the kernels' versions have for the sequence lengths."""

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
        num_paged: number of leading requests whose context is read in pages; None: all.
        chunks: the context of the others, each a ``context.Chunk``.
    """

    cached_lens: list[int] | None
    local_token_indices: torch.Tensor
    slot_mapping: torch.Tensor
    num_paged: int | None = None
    chunks: tuple[Any, ...] = ()


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
        long: requests behind the first ``num_single`` tokens, for which the kernel takes no pages
            (``unpaged.LongRequests``); ``lengths`` and ``block_table`` are those of the others, but
            with an int8 KV cache of all.
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
    long: Any = None
    num_single: int = 0

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


def to_script_list(lengths: list[int]) -> Any:
    """Convert a list for operator calls once instead of in each layer, where it dominates a call
    with 256 requests."""
    return torch._C.ScriptList(lengths)


def pad_queries(
    seq_lens: torch.Tensor, bounds: list[int], drafts: list[int]
) -> tuple[list[int], Callable[[], list[int]], torch.Tensor]:
    """Cumulative query lengths, sequence lengths and rows for requests with one query token and
    draft tokens in flight.

    ``seq_lens`` is known only on the device, and is up to ``drafts`` lower than ``bounds``. The
    kernel aligns the last query row with the last key, so that a token n rows before the last
    attends to n fewer keys: each request gets a row for each possible length, and the token goes to
    the row of its length.
    """
    ends = list(accumulate(count + 1 for count in drafts))
    last, longest = torch.tensor([[end - 1 for end in ends], bounds], pin_memory=True).to(
        seq_lens.device, non_blocking=True
    )
    return ends, lambda: bounds, last - longest + seq_lens


def assign_padding(
    num_tokens: int, cu_query_lens: list[int], seq_lens: list[int], num_dummies: int
) -> tuple[list[int], list[int]]:
    """Append dummy requests, and assign padding tokens to the dummy requests at the end of a padded
    batch.

    The kernel requires every token to belong to a request, and no request to have more query tokens
    than its sequence length.

    Returns:
        The cumulative query lengths and the sequence lengths.
    """
    cu_query_lens = cu_query_lens + cu_query_lens[-1:] * num_dummies
    seq_lens = seq_lens + [0] * num_dummies
    if padding := num_tokens - cu_query_lens[-1]:
        first_dummy = seq_lens.index(0)
        share, remainder = divmod(padding, len(seq_lens) - first_dummy)
        for request in range(first_dummy, len(seq_lens)):
            seq_lens[request] = share + (request - first_dummy < remainder)
            cu_query_lens[request] = (cu_query_lens[request - 1] if request else 0) + seq_lens[
                request
            ]
    return cu_query_lens, seq_lens


def longest_lengths(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a captured call with the longest sequences that its block table can hold, with
    which CANN returns the size of its workspace.

    A graph keeps the workspace and gets other sequence lengths at each replay. The size may grow
    with them: workspaces for the short sequences of a capture were overrun at 10,000 tokens
    (vllm-ascend, pull request 15486).
    """
    name = next(each for each in KEY_LENGTHS if each in arguments)
    room = arguments["block_table"].shape[1] * arguments["block_size"]
    longest = [min(room, MAX_DECODE_KEYS)] * len(arguments[name])
    return arguments | {name: to_script_list(longest)}


def mask_args(window: int | None, causal: bool, mask: torch.Tensor) -> dict[str, Any]:
    """The kernel's mask arguments: a sliding window, which ends at the token itself where attention
    is causal; causal; or none."""
    if window:
        return {
            "atten_mask": mask,
            "sparse_mode": 4,
            "pre_tokens": window - 1,
            "next_tokens": 0 if causal else ALL_TOKENS,
        }
    return {"atten_mask": mask, "sparse_mode": 3} if causal else {"sparse_mode": 0}


@functools.cache
def upper_triangle(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The compressed causal mask ``[2048, 2048]``, 1 above the diagonal; one per device
    and dtype."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=dtype).triu_(1).to(device)
