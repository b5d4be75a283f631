# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention layers of MiniMax-M3, which vLLM has by a fused CUDA operator and Triton kernels."""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerCache
from vllm.models.minimax_m3.common.sparse_attention import MiniMaxM3SparseImpl
from vllm.models.minimax_m3.nvidia import model as vllm_form
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from ascend_models.common.rows import PagedRows, RowsBackend, RowsMetadata, RowsMetadataBuilder
from ascend_models.minimax_m3 import blocks
from ascend_models.minimax_m3.limits import BLOCK_SIZE


def gemma_norm(hidden_size: int, eps: float = 1e-6) -> GemmaRMSNorm:
    """vLLM's layer of Gemma's norm, in the place of one by FlashInfer."""
    return GemmaRMSNorm(hidden_size, eps)


def heads_of(
    layer: Any,
    norms: tuple[torch.nn.Module, torch.nn.Module],
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize the heads of query and key ``[tokens, heads * head_size]``, and rotate them."""
    normed = [
        norm(each.unflatten(-1, (-1, layer.head_dim))).flatten(1)
        for norm, each in zip(norms, (query, key), strict=True)
    ]
    return layer.rotary_emb(positions, *normed)


class NPUAttention(vllm_form.MiniMaxM3Attention):
    """Attention to all keys."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], -1)
        query, key = heads_of(self, (self.q_norm, self.k_norm), positions, query, key)
        output, _ = self.o_proj(self.attn(query, key, value))
        return output


class BlockMetadataBuilder(RowsMetadataBuilder):
    reorder_batch_threshold = 1
    """Decodes come first, as in dense layers. Pipeline stages without these would order requests in
    another way."""


class BlockBackend(RowsBackend):
    """Backend of layers whose pages are the model's blocks of keys."""

    @staticmethod
    def get_builder_cls() -> type[RowsMetadataBuilder]:
        return BlockMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [BLOCK_SIZE]


class IndexCache(MiniMaxM3IndexerCache):
    """KV cache layer of index keys in the model's dtype."""

    group, window = 0, None  # for RowsMetadataBuilder

    def __init__(self, head_dim: int, prefix: str) -> None:
        backend: Any = BlockBackend
        super().__init__(head_dim, prefix, backend_cls=backend)
        dtype = get_current_vllm_config().model_config.dtype
        assert isinstance(dtype, torch.dtype)
        self.dtype = dtype

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache

    def split_kv_cache(self) -> PagedRows:
        """The layer's cache as ascend-platform binds it, ``[blocks, 1, rows, size]`` without the
        dimension of heads."""
        return PagedRows(self.kv_cache.squeeze(1))


class BlockIndexer(torch.nn.Module):
    """Indexer of a layer, see :mod:`ascend_models.minimax_m3.blocks`."""

    def __init__(self, **named: Any) -> None:
        """Take the arguments of vLLM's MiniMaxM3IndexerImpl."""
        super().__init__()
        self.heads, self.head_dim = named["num_index_heads"], named["index_head_dim"]
        self.selection = blocks.Selection(
            size=named["sparse_block_size"],
            topk=named["topk_blocks"],
            first=named["init_blocks"],
            local=named["local_blocks"],
        )
        self.index_cache = IndexCache(self.head_dim, f"{named['prefix']}.index_cache")

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Store the step's index keys, and select blocks.

        Args:
            query: ``[tokens, heads * size]``.
            key: ``[tokens, size]``.
            positions: int64 ``[tokens]``.

        Returns:
            See :func:`~ascend_models.minimax_m3.blocks.select`.
        """
        metadata: Any = get_forward_context().attn_metadata
        meta: RowsMetadata = metadata[self.index_cache.prefix]
        cache: Any = self.index_cache.kv_cache
        tokens, rows = meta.num_tokens, cache.rows
        rows.view(-1, self.head_dim).index_copy_(0, meta.slot_mapping, key[:tokens])
        heads = query[:tokens].unflatten(-1, (self.heads, -1))
        return blocks.select(heads, rows, meta, positions[:tokens], self.selection)


def indexer_class(**_: Any) -> type[BlockIndexer]:
    """The class of an indexer, of whatever arguments."""
    return BlockIndexer


def attention_classes(**_: Any) -> tuple[type[AttentionBackend], type[MiniMaxM3SparseImpl]]:
    """The backend of a layer with blocks, and the base of vLLM's implementations, which computes
    nothing: :class:`NPUSparseAttention` does."""
    return BlockBackend, MiniMaxM3SparseImpl


class NPUSparseAttention(vllm_form.MiniMaxM3SparseAttention):
    """Attention to selected blocks of keys."""

    group, window = 0, None  # for RowsMetadataBuilder

    def split_kv_cache(self) -> blocks.BlockPages:
        return blocks.split(self.kv_cache, self.head_dim)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        sizes = [self.q_size, self.kv_size, self.kv_size, self.index_q_size, self.idx_head_dim]
        query, key, value, index_query, index_key = qkv.split(sizes, -1)
        query, key = heads_of(self, (self.q_norm, self.k_norm), positions, query, key)
        norms = self.index_q_norm, self.index_k_norm
        index_query, index_key = heads_of(self, norms, positions, index_query, index_key)
        attended = torch.zeros_like(query)
        if get_forward_context().attn_metadata is not None:
            chosen = self.indexer.impl(index_query, index_key, positions)
            self._attend(query, key, value, positions, chosen, attended)
        output, _ = self.o_proj(attended)
        return output

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        chosen: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Store the step's keys and values, and attend."""
        metadata: Any = get_forward_context().attn_metadata
        meta: RowsMetadata = metadata[self.layer_name]
        tokens = meta.num_tokens
        if not tokens:
            return
        pages: Any = self.kv_cache
        rows = blocks.head_rows(meta, pages)
        for cache, new in zip(pages, (key, value), strict=True):
            heads = new[:tokens].reshape(-1, self.head_dim)
            cache.view(-1, self.head_dim).index_copy_(0, rows, heads)
        heads = query[:tokens].unflatten(-1, (self.num_heads, -1))
        attended = blocks.attend(heads, pages, meta, positions[:tokens], chosen, self.scaling)
        output[:tokens] = attended.flatten(1)
