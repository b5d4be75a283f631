# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sparse latent attention (DSA): npu_lightning_indexer selects tokens, npu_sparse_flash_attention
attends to them, or npu_kv_quant_sparse_flash_attention to int8 latents.

All tokens of a step are one call of each, in any mix of prefills and decodes. Sequence lengths are
read on the device, so the calls can be captured in graphs unchanged. Limits of the kernels are
those of ``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel, and of op-plugin's pages for them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform import extension
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)

from ascend_attention.latent import (
    LATENT,
    ROPE,
    FusedLatentAttentionBackend,
    pad_heads,
    write_latents,
)

INDEX_HEAD = 128
"""Size of an indexer head."""
MAX_INDEX_HEADS = 64
"""Maximum number of indexer heads."""

PER_TILE = 2
"""``key_quant_mode`` and ``value_quant_mode``: a scale for each :data:`TILE` latents."""
TILE = 128
"""Latents with one scale in an int8 KV cache."""

COUNTS = {*range(1, 2049), *range(3072, 8193, 1024)}
"""Numbers of tokens that npu_lightning_indexer selects."""


@dataclass
class SparseLatentMetadata(AttentionMetadata):
    """Metadata of one step, the same for attention and indexers.

    Attributes:
        num_actual_tokens: query tokens, including padding tokens in full-graph mode, which belong
            to no request.
        num_decodes: requests of vLLM.
        query_ends: int32 ``[requests]``, end of each request's query tokens.
        seq_lens: int32 ``[requests]``.
        block_table: int32 ``[requests, blocks]``.
        slot_mapping: KV cache slot of each token.
    """

    num_actual_tokens: int
    num_decodes: int
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_prefills: ClassVar[int] = 0

    @property
    def num_decode_tokens(self) -> int:
        """All tokens: vLLM's MLAAttention sends them to ``forward_mqa``."""
        return self.num_actual_tokens


class SparseLatentMetadataBuilder(AttentionMetadataBuilder[SparseLatentMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseLatentMetadata:
        common = common_attn_metadata
        return SparseLatentMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=common.num_reqs,
            query_ends=common.query_start_loc[1 : common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class FusedSparseLatentAttentionImpl(
    extension.SparseLatentAttentionImplBase, MLAAttentionImpl[SparseLatentMetadata]
):
    """Fused sparse latent attention; see ``extension.SparseLatentAttentionImplBase``."""

    title = "the fused sparse latent attention of ascend-attention"
    operators = (
        "npu_lightning_indexer",
        "npu_sparse_flash_attention",
        "npu_scatter_nd_update_",
        "npu_scatter_pa_kv_cache",
    )

    takes_int8_index = takes_int8_latents = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sizes = [self.kv_lora_rank, self.qk_rope_head_dim, self.num_heads]
        fits = sizes[:2] == [LATENT, ROPE] and self.num_heads <= 128
        if self.indexer is not None:
            index = self.indexer
            sizes += [index.head_dim, index.n_head, index.topk_tokens]
            fits = (
                fits
                and index.head_dim == INDEX_HEAD
                and index.n_head <= MAX_INDEX_HEADS
                and index.topk_tokens in COUNTS
            )
        if not fits:
            raise extension.RefusedError(
                f"{self.title} supports latents of {LATENT} with {ROPE} rotated elements, at most"
                f" 128 heads, indexers with at most {MAX_INDEX_HEADS} heads of {INDEX_HEAD}, and"
                " index_topk to 2048 or a multiple of 1024 to 8192, not"
                f" {', '.join(map(str, sizes))}; fix: VLLM_PLUGINS=ascend, for the built-in"
                " attention"
            )

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: Any,
        slot_mapping: torch.Tensor,
        *args: Any,
    ) -> None:
        """Write latents ``[tokens, 512]`` and rotated keys ``[tokens, 1, 64]`` into the
        KV cache."""
        slots = self.valid_slots(slot_mapping)
        if len(kv_cache) == 1:
            write_int8(kv_c_normed, k_pe, kv_cache[0], slots)
        else:
            write_latents((kv_c_normed, k_pe), kv_cache, slots)

    def write_index(
        self, key: torch.Tensor, index_cache: Any, attn_metadata: SparseLatentMetadata
    ) -> None:
        slots = attn_metadata.slot_mapping[: len(key)].unsqueeze(1)
        if isinstance(index_cache, tuple):
            key, scale = torch_npu.npu_dynamic_quant(key)
            index_cache, scales = index_cache
            torch_npu.npu_scatter_nd_update_(scales.view(-1, 1), slots, scale.half()[:, None])
        torch_npu.npu_scatter_nd_update_(index_cache.view(-1, INDEX_HEAD), slots, key)

    def select(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        index_cache: Any,
        attn_metadata: SparseLatentMetadata,
        selected: torch.Tensor,
    ) -> None:
        meta = attn_metadata
        common: dict[str, Any] = {
            "actual_seq_lengths_query": meta.query_ends,
            "actual_seq_lengths_key": meta.seq_lens,
            "block_table": meta.block_table,
            "layout_query": "TND",
            "layout_key": "PA_BSND",
            "sparse_count": selected.shape[1],
            "sparse_mode": 3,
        }
        if isinstance(index_cache, tuple):
            query, scale = torch_npu.npu_dynamic_quant(query)
            keys, scales = index_cache
            factors = weights.half(), scale.half(), scales
            indices = torch_npu.npu_quant_lightning_indexer(query, keys, *factors, 0, 0, **common)
        else:
            indices, _ = torch_npu.npu_lightning_indexer(query, index_cache, weights, **common)
        selected.copy_(indices.squeeze(1))

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: SparseLatentMetadata, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute attention of absorbed queries to the selected tokens.

        Args:
            q: the query's latent and rotated parts, ``[tokens, heads, 512]`` and ``[tokens, heads,
                64]``.
            kv_c_and_k_pe_cache: the layer's latents and rotated keys, or both as int8.

        Returns:
            ``[tokens, heads, 512]``, and no log-sum-exp.
        """
        meta, cache = attn_metadata, kv_c_and_k_pe_cache
        tokens, heads, _ = q[0].shape
        selected = self.topk_indices_buffer[:tokens].unsqueeze(1)
        common: dict[str, Any] = {
            "block_table": meta.block_table,
            "actual_seq_lengths_query": meta.query_ends,
            "actual_seq_lengths_kv": meta.seq_lens,
            "sparse_block_size": 1,
            "layout_query": "TND",
            "layout_kv": "PA_BSND",
            "sparse_mode": 3,
            "attention_mode": 2,
        }
        if len(cache) == 1:
            query, tensors = pad_heads(torch.cat(q, -1)), (*cache, *cache, selected)
            modes = PER_TILE, PER_TILE
            attend = torch_npu.npu_kv_quant_sparse_flash_attention
            return attend(query, *tensors, self.scale, *modes, **common)[:, :heads], None
        query, query_rope = map(pad_heads, q)
        latents, ropes = cache
        output = torch_npu.npu_sparse_flash_attention(
            query,
            latents,
            latents,
            selected,
            self.scale,
            query_rope=query_rope,
            key_rope=ropes,
            **common,
        )[0]
        return output[:, :heads], None


def write_int8(
    latents: torch.Tensor, ropes: torch.Tensor, packed: torch.Tensor, slots: torch.Tensor
) -> None:
    """Quantize the latents ``[tokens, 512]`` of the first tokens, as many as there are slots, and
    write them with the rotated keys ``[tokens, 1, 64]`` into pages ``[blocks, block_size, 1,
    656]``."""
    if tokens := len(slots):
        int8, scale = torch_npu.npu_dynamic_quant(latents[:tokens].unflatten(-1, (-1, TILE)))
        rope = ropes[:tokens].flatten(1).contiguous()
        parts = int8.flatten(1), rope.view(torch.int8), scale.view(torch.int8)
        torch_npu.npu_scatter_nd_update_(
            packed.flatten(0, 2), slots.unsqueeze(1), torch.cat(parts, -1)
        )


class FusedSparseLatentAttentionBackend(FusedLatentAttentionBackend):
    """Fused backend for vLLM's MLAAttention with ``use_sparse``, and for the KV cache of its
    indexer."""

    impl_cls, builder_cls = FusedSparseLatentAttentionImpl, SparseLatentMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True
