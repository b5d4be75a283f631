# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Blocks of keys that each token attends to: their selection by an indexer, and the attention.

A block has as many keys as a page of the KV cache. For each KV head an index query scores the index
keys of the request, and the blocks with the largest scores are selected, besides the first blocks
and the block of the token itself. Decodes, one token of each request, are computed by tensors of
one shape and without values of the host, so that graphs are possible; other requests are computed
one after the other. All is in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from ascend_models.common.rows import RowsMetadata

MAX_ELEMENTS = 1 << 25
"""Upper bound of the elements of the scores, or of the gathered keys, in one chunk of tokens (128
MiB in float32)."""

DENSE_FACTOR = 4
"""Up to this number of times the selected blocks, a prefill computes the scores of all keys and
masks those of other blocks. Beyond, it gathers the selected ones for each token."""

LOCAL = torch.finfo(torch.float32).max
"""Score of a block that is selected besides the first blocks."""


@dataclass(frozen=True)
class Selection:
    """Which blocks a model selects.

    Attributes:
        size: keys of a block.
        topk: blocks of a token, with those that are selected always.
        first: first blocks of a request that are selected always.
        local: blocks up to the token's own that are selected always.
    """

    size: int
    topk: int
    first: int
    local: int


class BlockPages(NamedTuple):
    """Keys and values of one layer, so that the keys of a head in a page are contiguous.

    Attributes:
        key: ``[blocks, kv_heads, block_size, head_size]``, contiguous.
        value: ``[blocks, kv_heads, block_size, head_size_v]``, contiguous.
    """

    key: torch.Tensor
    value: torch.Tensor


def split(cache: torch.Tensor, head_size: int) -> BlockPages:
    """Split a layer's region, vLLM's view ``[blocks, kv_heads, block_size, head_size +
    head_size_v]`` in layout LBNHC, into keys and values, as views."""
    blocks, heads, rows, width = cache.shape
    sizes = head_size, width - head_size
    flat = cache.transpose(1, 2).view(-1)
    parts = flat.split([blocks * heads * rows * size for size in sizes])
    key, value = (
        part.view(blocks, heads, rows, size) for part, size in zip(parts, sizes, strict=True)
    )
    return BlockPages(key, value)


def head_rows(meta: RowsMetadata, pages: BlockPages) -> torch.Tensor:
    """The row of each token and head in the keys as ``[rows, head_size]``, int64 ``[tokens *
    kv_heads]``."""
    _, heads, rows, _ = pages.key.shape

    def compute() -> torch.Tensor:
        slots = meta.slot_mapping
        block = slots // rows
        each = torch.arange(heads, device=slots.device)
        return ((block.unsqueeze(1) * heads + each) * rows + (slots % rows).unsqueeze(1)).flatten()

    return meta.once(f"rows of {heads} heads", compute)


def chunks(start: int, end: int, elements: int) -> Iterator[slice]:
    """Tokens from start to end, in chunks of at most MAX_ELEMENTS; ``elements`` of each token."""
    step = max(1, MAX_ELEMENTS // elements)
    for first in range(start, end, step):
        yield slice(first, min(first + step, end))


def select(
    query: torch.Tensor,
    keys: torch.Tensor,
    meta: RowsMetadata,
    positions: torch.Tensor,
    selection: Selection,
) -> torch.Tensor:
    """Select blocks of keys.

    Args:
        query: ``[tokens, heads, size]``.
        keys: the cache, ``[blocks, block_size, size]``.
        meta: of the keys' layer.
        positions: int64 ``[tokens]``.
        selection: which blocks.

    Returns:
        int64 ``[tokens, heads, n]``, numbers of blocks of a token's request, -1 for none; n is at
        most ``selection.topk``.
    """
    tokens, heads, size = query.shape
    most = -(-meta.longest // selection.size)
    width = min(selection.topk, most)
    chosen = torch.full((tokens, heads, width), -1, dtype=torch.int64, device=query.device)

    def choose(some: slice, tables: torch.Tensor) -> None:
        """Choose for tokens, whose requests' tables are ``[tokens, blocks]`` or one for all."""
        scores = block_scores(query[some], keys, tables, positions[some], selection)
        best, blocks = scores.topk(min(width, tables.shape[1]))
        chosen[some, :, : blocks.shape[-1]] = blocks.masked_fill(best == -torch.inf, -1)

    decodes = count_decodes(meta)
    for some in chunks(0, decodes, most * selection.size * max(heads, size)):
        choose(some, meta.block_table[some, :most].long())
    for request, (start, end) in requests(meta, decodes):
        blocks = -(-meta.seq_lens[request] // selection.size)
        table = meta.block_table[request : request + 1, :blocks].long()
        for some in chunks(start, end, blocks * selection.size * heads):
            choose(some, table)
    return chosen


def count_decodes(meta: RowsMetadata) -> int:
    """Leading requests with one token; vLLM orders requests so."""
    if meta.is_static:
        return meta.num_tokens
    lengths = [end - start for start, end in pairwise(meta.query_start_loc)]
    return next((i for i, length in enumerate(lengths) if length != 1), len(lengths))


def requests(meta: RowsMetadata, first: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Requests from the first on, and where their tokens begin and end; those without are left
    out."""
    for request, (start, end) in enumerate(pairwise(meta.query_start_loc)):
        if request >= first and start < end:
            yield request, (start, end)


def block_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    selection: Selection,
) -> torch.Tensor:
    """The largest score of a visible key in each block, float32 ``[tokens, heads, blocks]``;
    infinite or LOCAL for blocks that are selected always, -infinite for those without visible keys.

    Args:
        query: ``[tokens, heads, size]``.
        keys: ``[pages, block_size, size]``.
        tables: int64 ``[tokens or 1, blocks]``, the page of each block.
        positions: int64 ``[tokens]``.
        selection: which blocks are selected always.
    """
    blocks = tables.shape[1]
    own = keys[tables].flatten(1, 2).float()
    scores = query.float() @ own.transpose(1, 2)
    place = torch.arange(blocks * selection.size, device=query.device)
    # Pages that were freed may hold NaN.
    is_hidden = (place > positions.unsqueeze(1)).unsqueeze(1)
    scores = scores.masked_fill_(is_hidden, -torch.inf).unflatten(-1, (blocks, selection.size))
    largest = scores.amax(-1)
    number = torch.arange(blocks, device=query.device)
    distance = (positions // selection.size).unsqueeze(1) - number
    is_seen = distance >= 0
    is_local = (is_seen & (distance < selection.local)).unsqueeze(1)
    largest = largest.masked_fill(is_local, LOCAL)
    if selection.first:
        is_first = (is_seen & (number < selection.first)).unsqueeze(1)
        largest = largest.masked_fill(is_first, torch.inf)
    return largest


def attend(
    query: torch.Tensor,
    pages: BlockPages,
    meta: RowsMetadata,
    positions: torch.Tensor,
    chosen: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend to the visible keys of the chosen blocks.

    Args:
        query: ``[tokens, heads, head_size]``.
        pages: of the layer.
        meta: of the layer.
        positions: int64 ``[tokens]``.
        chosen: of :func:`select`, ``[tokens, kv_heads, n]``.
        scale: of the logits.

    Returns:
        Like query.
    """
    _, heads, size, width = pages.key.shape
    output = torch.empty_like(query)
    grouped = query.unflatten(1, (heads, -1))
    results = output.unflatten(1, (heads, -1))
    selected = max(1, chosen.shape[-1])

    def gathered(start: int, end: int, tables: torch.Tensor) -> None:
        """Compute tokens; the tables are those of the tokens of the step, or one for all."""
        for some in chunks(start, end, heads * selected * size * width):
            own = tables[some] if len(tables) > 1 else tables.expand(some.stop - some.start, -1)
            results[some] = attend_chosen(
                grouped[some], pages, own, positions[some], chosen[some], scale
            ).to(query.dtype)

    decodes = count_decodes(meta)
    if decodes:
        gathered(0, decodes, meta.block_table[:decodes].long())
    for request, (start, end) in requests(meta, decodes):
        blocks = -(-meta.seq_lens[request] // size)
        table = meta.block_table[request : request + 1, :blocks].long()
        if blocks > DENSE_FACTOR * selected:
            gathered(start, end, table)
            continue
        for some in chunks(start, end, blocks * size * query.shape[1]):
            results[some] = attend_masked(
                grouped[some], pages, table[0], positions[some], chosen[some], scale
            ).to(query.dtype)
    return output


def attend_chosen(
    query: torch.Tensor,
    pages: BlockPages,
    tables: torch.Tensor,
    positions: torch.Tensor,
    chosen: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of tokens to the keys of their blocks, gathered for each.

    Args:
        query: ``[tokens, kv_heads, group, head_size]``.
        pages: of the layer.
        tables: int64 ``[tokens, blocks]``, of each token's request.
        positions: int64 ``[tokens]``.
        chosen: ``[tokens, kv_heads, n]``.
        scale: of the logits.

    Returns:
        float32, like query.
    """
    _, heads, size, _ = pages.key.shape
    found = tables.gather(1, chosen.clamp_min(0).flatten(1)).view(chosen.shape)
    number = found * heads + torch.arange(heads, device=query.device).unsqueeze(1)
    keys, values = (each.flatten(0, 1)[number].flatten(2, 3).float() for each in pages)
    place = chosen.unsqueeze(-1) * size + torch.arange(size, device=query.device)
    is_hidden = (chosen < 0).unsqueeze(-1) | (place > positions.view(-1, 1, 1, 1))
    is_hidden = is_hidden.flatten(2)
    logits = (query.float() @ keys.transpose(2, 3)).mul_(scale)
    weights = logits.masked_fill_(is_hidden.unsqueeze(2), -torch.inf).softmax(-1)
    # Pages that were freed may hold NaN.
    return weights @ values.masked_fill(is_hidden.unsqueeze(-1), 0)


def attend_masked(
    query: torch.Tensor,
    pages: BlockPages,
    table: torch.Tensor,
    positions: torch.Tensor,
    chosen: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As :func:`attend_chosen` for tokens of one request, by the logits of all its keys.

    Args:
        table: int64 ``[blocks]``, of the request.
    """
    tokens, heads, group, width = query.shape
    size, blocks = pages.key.shape[2], len(table)
    keys, values = (each[table].transpose(0, 1).flatten(1, 2).float() for each in pages)
    rows = query.float().transpose(0, 1).reshape(heads, tokens * group, width)
    logits = (rows @ keys.transpose(1, 2)).mul_(scale).view(heads, tokens, group, -1)
    is_chosen = query.new_zeros((tokens, heads, blocks + 1), dtype=torch.float32)
    is_chosen.scatter_(-1, chosen.masked_fill(chosen < 0, blocks), 1.0)
    of_keys = is_chosen[..., :blocks].unsqueeze(-1).expand(-1, -1, -1, size).flatten(2)
    place = torch.arange(blocks * size, device=query.device)
    is_future = place > positions.unsqueeze(1)
    is_hidden = ((of_keys == 0) | is_future.unsqueeze(1)).transpose(0, 1).unsqueeze(2)
    weights = logits.masked_fill_(is_hidden, -torch.inf).softmax(-1)
    # Keys beyond the last token are of no request.
    values = values.masked_fill((place > positions[-1]).view(1, -1, 1), 0)
    return (weights.flatten(1, 2) @ values).view(heads, tokens, group, -1).transpose(0, 1)
