# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention of heads for which the kernel takes no pages where a request has several query tokens
and keys before them.

On Atlas A2 it computes NaN and infinities from finite pages for heads above 192
(``ChipFamily.chunk_head_size``; vllm-ascend, pull request 16303). Decodes with one token for each
request and layout TND without pages are served there. So requests of few tokens, such as
decodes with their drafts, are cut into requests of one token each, which graphs take too. Keys and
values of longer ones are read from the cache into a workspace of bounded size: with one call for all
requests that fit together, and for a longer one with a call for its new tokens and others for its
context, whose results are merged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch_npu
from ascend_platform import extension

from ascend_attention.context import Chunk, Piece, chunk_of, cut_context, merge
from ascend_attention.metadata import mask_args

MAX_SINGLE = 16
"""Query tokens up to which a request is cut into requests of one token; they read its keys as
often."""

WORKSPACE_TOKENS = 4096
"""Tokens of keys and values in the workspace; more if a step has more new tokens."""

Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Reads keys and values ``[tokens, kv_heads, head_size]`` of KV cache slots."""


def is_needed(head_size: int) -> bool:
    """Whether the chip's kernel takes no pages for several query tokens of such heads."""
    return head_size > extension.chip().family.chunk_head_size


def capacity(num_tokens: int, window: int | None) -> int:
    """Most tokens in the workspace of a step with ``num_tokens`` new tokens, which see no more than
    a sliding window before them."""
    return max(num_tokens, WORKSPACE_TOKENS) + (window or 0)


def reserve(impl: Any, query: torch.Tensor) -> None:
    """Allocate and free what a step of these tokens allocates, so that it is in the profiled peak of
    memory."""
    room = capacity(len(query), impl.sliding_window)
    workspace = [query.new_empty(room, impl.num_kv_heads, impl.head_size) for _ in range(2)]
    # The output of a call, and the merged outputs before and after it.
    workspace += [torch.empty_like(query, dtype=torch.float32) for _ in range(3)]
    workspace.clear()


def reader(key_cache: torch.Tensor, value_cache: torch.Tensor) -> Read:
    """Reads caches ``[blocks, block_size, kv_heads, head_size]``."""
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    return lambda slots: (keys.index_select(0, slots), values.index_select(0, slots))


@dataclass(frozen=True)
class Plan:
    """Calls for some consecutive requests.

    Attributes:
        last: their last keys.
        causal: whether a token sees no later ones among these.
        context: keys before, which each query token of the one request sees.
    """

    last: Chunk
    causal: bool
    context: list[Chunk]


@dataclass(frozen=True)
class LongRequests:
    """The requests of a step that are not cut into single tokens.

    Attributes:
        ends: cumulative query lengths.
        seq_lens: computes the sequence length of each.
        block_table: int32 ``[requests, blocks]``.
        mask: int8 ``[2048, 2048]``, 1 above the diagonal.
        causal: whether a token sees no later ones.
    """

    ends: list[int]
    seq_lens: Callable[[], list[int]]
    block_table: torch.Tensor
    mask: torch.Tensor
    causal: bool = True
    _plans: dict[int, list[Plan]] = field(default_factory=dict)

    def plans(self, window: int | None) -> list[Plan]:
        """The calls of a layer with this sliding window, the same for all such layers."""
        if (window or 0) not in self._plans:
            self._plans[window or 0] = list(map(self._plan, self._groups(window)))
        return self._plans[window or 0]

    def _groups(self, window: int | None) -> list[tuple[list[Piece], list[list[Piece]]]]:
        """The last keys of requests that fit into the workspace together, and the context of one
        that does not."""
        counts = [end - start for start, end in pairwise([0, *self.ends])]
        room = capacity(self.ends[-1], window)
        groups: list[tuple[list[Piece], list[list[Piece]]]] = []
        free = 0
        for request, (count, length) in enumerate(zip(counts, self.seq_lens(), strict=True)):
            first = max(0, length - count - window + 1) if window else 0
            context: list[list[Piece]] = []
            if length - first > room:
                first = length - count if self.causal else length - room
                context = cut_context([0] * request + [first], room)
            piece = Piece(request, first, length)
            if context or length - first > free or groups[-1][1]:
                groups.append(([], context))
                free = room
            groups[-1][0].append(piece)
            free -= length - first
        return groups

    def _plan(self, group: tuple[list[Piece], list[list[Piece]]]) -> Plan:
        last, *context = (
            chunk_of(pieces, self.ends, self.block_table) for pieces in (group[0], *group[1])
        )
        return Plan(last, self.causal, context)


def attend(
    impl: Any, query: torch.Tensor, read: Read, requests: LongRequests, output: torch.Tensor
) -> None:
    """Write the attention output ``[tokens, heads, head_size]`` of long requests.

    Args:
        impl: a FusedAttentionImpl.
    """
    kernel = getattr(torch_npu, impl.operators[0])
    heads = impl._head_args()
    for plan in requests.plans(impl.sliding_window):
        rows = plan.last.rows
        mask = mask_args(impl.sliding_window, plan.causal, requests.mask)
        mask["softmax_lse_flag"] = bool(plan.context)
        attended = _call(kernel, query, read, plan.last, **heads, **mask)
        if plan.context:
            attended = attended[0].float(), attended[1]
            attended = with_context(kernel, query, read, plan.context, attended, rows.start, heads)
        output[rows] = attended[0].to(output.dtype)


def with_context(
    kernel: Any,
    query: torch.Tensor,
    read: Read,
    chunks: Sequence[Chunk],
    attended: tuple[torch.Tensor, torch.Tensor],
    start: int,
    heads: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention to chunks of context, which each query token sees, with what is attended.

    Args:
        query: ``[tokens, heads, head_size]``.
        attended: output in float32 and softmax_lse ``[rows, heads, 1]`` of the rows from ``start``
            on; minus infinity for nothing yet.
        heads: the kernel's arguments for the heads.
    """
    output, softmax_lse = attended
    for chunk in chunks:
        part, lse = _call(kernel, query, read, chunk, softmax_lse_flag=True, sparse_mode=0, **heads)
        rows = slice(chunk.rows.start - start, chunk.rows.stop - start)
        merged, sums = merge(
            [softmax_lse[rows].flatten(), lse.flatten()],
            [output[rows].flatten(0, 1), part.flatten(0, 1)],
        )
        output[rows] = merged.view_as(part)
        softmax_lse[rows] = sums.view_as(lse)
    return output, softmax_lse


def _call(
    kernel: Any, query: torch.Tensor, read: Read, chunk: Chunk, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return kernel(
        query[chunk.rows].contiguous(),
        *read(chunk.slots),
        input_layout="TND",
        actual_seq_lengths=chunk.lengths[0],
        actual_seq_lengths_kv=chunk.lengths[1],
        **arguments,
    )


class SingleTokens:
    """Requests whose query tokens are requests of their own."""

    def __init__(self, ends: list[int], num_tokens: int, causal: bool) -> None:
        """Take the requests' cumulative query lengths, the number of tokens with those of a graph's
        padding behind them, which see a token of the null block each, and whether a token sees
        no later ones."""
        counts = [end - start for start, end in pairwise([0, *ends])]
        self._requests = [request for request, count in enumerate(counts) for _ in range(count)]
        self._after = [after if causal else 0 for n in counts for after in range(n - 1, -1, -1)]
        self.num_tokens = max(num_tokens, len(self._requests))

    def lengths(self, seq_lens: list[int]) -> tuple[list[int], list[int]]:
        """Cumulative query lengths and sequence lengths, of the requests' sequence lengths."""
        pairs = zip(self._requests, self._after, strict=True)
        lens = [max(seq_lens[request] - after, 0) for request, after in pairs]
        return list(range(1, self.num_tokens + 1)), lens + [1] * (self.num_tokens - len(lens))

    def block_table(self, table: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Rows of the requests' block table, in a graph's buffer if they fit."""
        index = torch.tensor(self._requests, pin_memory=True)
        index = index.to(table.device, non_blocking=True)
        if self.num_tokens > len(buffer):
            return table.index_select(0, index)
        rows = buffer[: self.num_tokens]
        torch.index_select(table, 0, index, out=rows[: len(index)])
        rows[len(index) :].zero_()
        return rows
