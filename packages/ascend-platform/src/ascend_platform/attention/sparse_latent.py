# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Built-in sparse latent attention (DSA): PyTorch over the paged latents and the indexer's keys, of
any widths, in float32."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from ascend_platform.attention.base import SparseLatentAttentionImplBase
from ascend_platform.attention.latent import (
    PagedLatentAttentionBackend,
    PagedLatentAttentionImpl,
    PagedLatentAttentionMetadata,
    PagedLatentAttentionMetadataBuilder,
)
from ascend_platform.attention.paged import MAX_ELEMENTS


@dataclass
class PagedSparseLatentMetadata(PagedLatentAttentionMetadata):
    """Metadata of one step.

    Attributes:
        requests: int64 ``[tokens]``, the request of each query token.
    """

    requests: torch.Tensor


class PagedSparseLatentMetadataBuilder(PagedLatentAttentionMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedSparseLatentMetadata:
        latent = super().build(common_prefix_len, common_attn_metadata, fast_build)
        lengths = torch.tensor([end - start for start, end in pairwise(latent.query_start_loc)])
        requests = torch.arange(len(lengths)).repeat_interleave(lengths).pin_memory()
        return PagedSparseLatentMetadata(
            **vars(latent), requests=requests.to(latent.block_table.device, non_blocking=True)
        )


class PagedSparseLatentAttentionImpl(SparseLatentAttentionImplBase, PagedLatentAttentionImpl):
    """Built-in sparse latent attention; see ``SparseLatentAttentionImplBase``."""

    title = "the built-in sparse latent attention of ascend-platform"

    def write_index(
        self, key: torch.Tensor, index_cache: torch.Tensor, attn_metadata: PagedSparseLatentMetadata
    ) -> None:
        slots = attn_metadata.slot_mapping
        index_cache.view(-1, index_cache.shape[-1])[slots] = key[: len(slots)]

    def select(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        index_cache: torch.Tensor,
        attn_metadata: PagedSparseLatentMetadata,
        selected: torch.Tensor,
    ) -> None:
        """Select tokens request by request, in chunks of query tokens that keep the scores below
        MAX_ELEMENTS."""
        meta, heads, most = attn_metadata, query.shape[1], selected.shape[1]
        selected.fill_(-1)
        for request, (start, end) in enumerate(pairwise(meta.query_start_loc)):
            length = meta.seq_lens[request]
            if start == end or not length:
                continue
            blocks = meta.block_table[request, : -(-length // index_cache.shape[1])]
            keys = index_cache[blocks].flatten(0, 2)[:length].float()
            positions = torch.arange(length, device=query.device)
            chunk, count = max(1, MAX_ELEMENTS // (length * heads)), min(most, length)
            for first in range(start, end, chunk):
                rows = slice(first, min(first + chunk, end))
                scores = (query[rows].float() @ keys.t()).relu_()
                scores = (weights[rows].float().unsqueeze(1) @ scores).squeeze(1)
                own = positions[length - end + first : length - end + rows.stop]
                scores.masked_fill_(positions > own.unsqueeze(1), -torch.inf)
                best, indices = scores.topk(count)
                selected[rows, :count] = indices.masked_fill(best == -torch.inf, -1).int()

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: PagedSparseLatentMetadata, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute attention of absorbed queries to the selected tokens, in chunks that keep the
        gathered keys below MAX_ELEMENTS.

        Args:
            q: the query's latent and rotated parts, ``[tokens, heads, kv_lora_rank]`` and
                ``[tokens, heads, qk_rope_head_dim]``.
            kv_c_and_k_pe_cache: the layer's PagedLatent.

        Returns:
            ``[tokens, heads, kv_lora_rank]``, and no log-sum-exp.
        """
        query, meta, block_size = torch.cat(q, -1), attn_metadata, kv_c_and_k_pe_cache[0].shape[1]
        output = q[0].new_empty(*query.shape[:2], self.kv_lora_rank)
        chunk = max(1, MAX_ELEMENTS // (self.topk_indices_buffer.shape[1] * query.shape[2]))
        for first in range(0, len(query), chunk):
            rows = slice(first, min(first + chunk, len(query)))
            named = self.topk_indices_buffer[rows].long()
            positions = named.clamp_min(0)
            blocks = meta.block_table[meta.requests[rows]].gather(1, positions // block_size)
            slots = blocks * block_size + positions % block_size
            latents, ropes = (cache.flatten(0, 2)[slots].float() for cache in kv_c_and_k_pe_cache)
            keys = torch.cat((latents, ropes), -1)
            scores = (query[rows].float() @ keys.transpose(1, 2)).mul_(self.scale)
            scores = scores.masked_fill_((named < 0).unsqueeze(1), -torch.inf)
            output[rows] = (scores.softmax(-1) @ latents).to(output.dtype)
        return output, None


class PagedSparseLatentAttentionBackend(PagedLatentAttentionBackend):
    """Built-in backend for vLLM's MLAAttention with ``use_sparse``, and for the KV cache of its
    indexer."""

    impl_cls, builder_cls = PagedSparseLatentAttentionImpl, PagedSparseLatentMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True
