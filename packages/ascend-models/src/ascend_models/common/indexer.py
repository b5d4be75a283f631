# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Indexer over compressed keys: the rows with the largest sums over heads of
``weight * relu(query @ key)``."""

from itertools import pairwise
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import ReplicatedLinear

from ascend_models.common.compressor import Compressor
from ascend_models.common.rotary import rotate
from ascend_models.common.rows import RowCache, RowsMetadata

MAX_ELEMENTS = 1 << 24
"""Upper bound of the elements of the scores in one chunk of tokens."""


class CompressedIndexer(torch.nn.Module):
    """Parameters as in vLLM's DeepseekV4Indexer, the compressor of the keys and their KV cache layer.

    Args:
        config: with ``index_n_heads``, ``index_head_dim``, ``index_topk``, ``q_lora_rank``,
            ``hidden_size`` and ``rms_norm_eps``.
        ratio: tokens of a key.
        dtype: of the keys.
        page_bytes: of the KV cache layers.
        quant_config: of the query's projection.
        prefix: name of the module.
    """

    def __init__(
        self,
        config: Any,
        ratio: int,
        dtype: torch.dtype,
        page_bytes: int,
        quant_config: Any,
        prefix: str,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.topk, self.ratio = config.index_topk, ratio
        self.wq_b = ReplicatedLinear(
            config.q_lora_rank,
            self.heads * self.head_dim,
            bias=False,
            return_bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wq_b",
        )
        self.weights_proj = ReplicatedLinear(
            config.hidden_size,
            self.heads,
            bias=False,
            return_bias=False,
            quant_config=None,
            prefix=f"{prefix}.weights_proj",
        )
        self.k_cache = RowCache(f"{prefix}.k_cache", self.head_dim, dtype, page_bytes, ratio=ratio)
        self.compressor = Compressor(
            config.hidden_size,
            self.head_dim,
            ratio,
            self.k_cache,
            config.rms_norm_eps,
            f"{prefix}.compressor",
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor | None:
        """Store the step's keys, and select for each token.

        Args:
            hidden_states: ``[tokens, hidden_size]``.
            latent: the normalized latent of the query, ``[tokens, q_lora_rank]``.
            positions: int64 ``[tokens]``.
            cos_sin: float32 ``[positions, 2 * pairs]``, the table of the rotary embedding.

        Returns:
            int64 ``[tokens of the step, index_topk]``, numbers of rows, -1 for none; None if each
            token attends to all that it sees.
        """
        self.compressor(hidden_states, positions, cos_sin)
        metadata: Any = get_forward_context().attn_metadata
        meta: RowsMetadata = metadata[self.k_cache.prefix]
        tokens = meta.num_tokens
        most = meta.longest // self.ratio
        if most <= self.topk:
            return None
        visible = (positions[:tokens] + 1) // self.ratio
        query = self.wq_b(latent[:tokens]).view(tokens, self.heads, self.head_dim)
        query = rotate(query, cos_sin[positions[:tokens]])
        weights = self.weights_proj(hidden_states[:tokens])
        if meta.is_static:
            return select_each(query, weights, self.k_cache.rows, meta, visible, self.topk, most)
        return select(query, weights, self.k_cache.rows, meta, visible, self.topk, self.ratio)


def all_rows(visible: torch.Tensor, most: int) -> torch.Tensor:
    """The first rows of each token, ``[tokens, most]``, -1 from the number of its visible rows on."""
    rows = torch.arange(most, device=visible.device).expand(len(visible), -1)
    return torch.where(rows < visible.unsqueeze(1), rows, -1)


def select(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    meta: RowsMetadata,
    visible: torch.Tensor,
    topk: int,
    ratio: int,
) -> torch.Tensor:
    """Select rows in float32, request by request.

    Args:
        query: ``[tokens, heads, size]``.
        weights: ``[tokens, heads]``.
        keys: the cache, ``[slots, size]``.
        meta: of the keys' layer.
        visible: int64 ``[tokens]``, rows that a token may select.
        topk: rows to select.
        ratio: tokens of a row.

    Returns:
        int64 ``[tokens, topk]``, -1 for none.
    """
    selected = torch.full((len(query), topk), -1, dtype=torch.int64, device=query.device)
    for request, (start, end) in enumerate(pairwise(meta.query_start_loc)):
        count = meta.seq_lens[request] // ratio
        if start == end or not count:
            continue
        named = torch.arange(count, device=query.device)
        slots = meta.slots(named.unsqueeze(0), meta.requests[start : start + 1]).squeeze(0)
        own = keys[slots].float()
        chunk = max(1, MAX_ELEMENTS // (count * query.shape[1]))
        for first in range(start, end, chunk):
            some = slice(first, min(first + chunk, end))
            scores = (query[some].float() @ own.t()).relu_()
            scores = (weights[some].float().unsqueeze(1) @ scores).squeeze(1)
            scores.masked_fill_(named >= visible[some].unsqueeze(1), -torch.inf)
            best, rows = scores.topk(min(topk, count))
            selected[some, : rows.shape[1]] = rows.masked_fill(best == -torch.inf, -1)
    return selected


def select_each(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    meta: RowsMetadata,
    visible: torch.Tensor,
    topk: int,
    most: int,
) -> torch.Tensor:
    """As :func:`select`, for steps whose tokens are requests of their own, by tensors of one shape.

    Args:
        most: rows that a request may have.
    """
    named = torch.arange(most, device=query.device)
    found = []
    chunk = max(1, MAX_ELEMENTS // (most * max(query.shape[1:])))
    for first in range(0, len(query), chunk):
        some = slice(first, first + chunk)
        is_hidden = named >= visible[some].unsqueeze(1)
        slots = meta.slots(named.masked_fill(is_hidden, -1), meta.requests[some])
        own = keys[slots.clamp_min(0)].float().masked_fill(is_hidden.unsqueeze(-1), 0)
        scores = (query[some].float() @ own.transpose(1, 2)).relu_()
        scores = (weights[some].float().unsqueeze(1) @ scores).squeeze(1)
        best, rows = scores.masked_fill_(is_hidden, -torch.inf).topk(topk)
        found.append(rows.masked_fill(best == -torch.inf, -1))
    return torch.cat(found)
