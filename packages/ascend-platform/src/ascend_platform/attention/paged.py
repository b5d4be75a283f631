# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Built-in attention: PyTorch over the paged KV cache, so that the platform serves without
ascend-attention.

Dense attention (multi-head, grouped-query, multi-query) for prefill, chunked prefill, prefix-cache
hits and decode in one batch: causal, with sliding windows, attention sinks, logits soft caps or
ALiBi, and encoder-decoder attention. It gathers keys and values from the blocks and computes in
float32. Install ascend-attention for the fused kernel.
"""

import functools
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from ascend_platform.attention.base import (
    AttentionBackendBase,
    AttentionFeature,
    AttentionImplBase,
)
from ascend_platform.attention.kv_cache import KVCachePair
from ascend_platform.attention.length_bounds import host_lengths

MAX_ELEMENTS = 1 << 24
"""Upper bound of the elements of the scores, and of the gathered keys, in one chunk of the
computation (64 MiB in float32)."""


@dataclass
class PagedAttentionMetadata(AttentionMetadata):
    """Metadata of one step. Decodes (requests with one query token) come first
    (``reorder_batch_threshold``).

    Attributes:
        query_start_loc: start of each request's query tokens, on the host, ``requests + 1``
            entries.
        seq_lens: sequence length of each request after this step's tokens are written, on the host.
        block_table: int32 ``[requests, blocks]``.
        slot_mapping: int64, KV cache slot of each new key; with prefill context parallelism of all
            ranks' tokens, including padding. vLLM replaces it in layers with cross attention.
        num_decodes: number of leading requests with one query token.
        decode_seq_lens: int32 ``[num_decodes]``, seq_lens on the device.
        max_decode_tokens: tokens in the blocks of the longest decode.
        causal: False for cross attention, where every token attends to all of its request's keys.
        mm_prefix_range: for each request the first and last positions of images, whose tokens
            attend to each other in both directions. vLLM's Gemma 4 sets it to None for layers
            without.
    """

    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    decode_seq_lens: torch.Tensor
    max_decode_tokens: int
    causal: bool
    mm_prefix_range: dict[int, list[tuple[int, int]]] | None = field(default=None, kw_only=True)


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        self.uses_pcp = vllm_config.parallel_config.prefill_context_parallel_size > 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedAttentionMetadata:
        """Build the metadata of one step on the host, without synchronizing with the device."""
        common = common_attn_metadata
        seq_lens = host_lengths(common_attn_metadata, PagedAttentionImpl.title)
        query_start_loc = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        query_lens = [end - start for start, end in pairwise(query_start_loc)]
        others = (i for i, query_len in enumerate(query_lens) if query_len != 1)
        num_decodes = next(others, len(seq_lens))
        block_size = self.kv_cache_spec.block_size
        max_blocks = -(-max(seq_lens[:num_decodes], default=0) // block_size)
        slots = common.slot_mapping
        return PagedAttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=slots if self.uses_pcp else slots[: query_start_loc[-1]],
            num_decodes=num_decodes,
            decode_seq_lens=common.seq_lens[:num_decodes],
            max_decode_tokens=max_blocks * block_size,
            causal=bool(common.causal),
            mm_prefix_range=common.mm_req_doc_ranges,
        )


class PagedAttentionImpl(AttentionImplBase, AttentionImpl[PagedAttentionMetadata]):
    """Built-in attention in float32; see :class:`~ascend_platform.attention.base.AttentionImplBase`
    for the constructor."""

    title = "the built-in attention of ascend-platform"
    serves = frozenset(AttentionFeature) - {
        AttentionFeature.ENCODER,
        AttentionFeature.ENCODER_ONLY,
    }
    supports_pcp = True

    def write(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCachePair,
        meta: PagedAttentionMetadata,
    ) -> None:
        """Write by index_copy_; see the base class."""
        key, value = self.gather_new(key, value)
        for cache, new in ((kv_cache.key, key), (kv_cache.value, value)):
            rows = cache.view(-1, *cache.shape[2:])
            rows.index_copy_(0, meta.slot_mapping, new[: len(meta.slot_mapping)])

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCachePair,
        meta: PagedAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Compute requests in decode together, and others one after the other."""
        if meta.num_decodes:
            self._decode(query, kv_cache, meta, output)
        for request in range(meta.num_decodes, len(meta.seq_lens)):
            self._prefill(request, query, kv_cache, meta, output)
        if self.pcp_world_size > 1:
            # The next layers write keys of padding tokens.
            output[meta.query_start_loc[-1] :] = 0

    def _decode(
        self, query: torch.Tensor, kv_cache: Any, meta: PagedAttentionMetadata, output: torch.Tensor
    ) -> None:
        """Compute all decodes, padded to the longest, in chunks of requests that keep the gathered
        keys below MAX_ELEMENTS."""
        max_tokens = meta.max_decode_tokens
        max_blocks = max_tokens // kv_cache[0].shape[1]
        chunk = max(1, MAX_ELEMENTS // max(1, max_tokens * kv_cache[0].shape[2] * self.head_size))
        key_positions = torch.arange(max_tokens, dtype=torch.int32, device=query.device)
        for start in range(0, meta.num_decodes, chunk):
            rows = slice(start, min(start + chunk, meta.num_decodes))
            keys, values = self._gather(kv_cache, meta.block_table[rows, :max_blocks])
            # 0 at the query token itself
            distance = key_positions - meta.decode_seq_lens[rows].unsqueeze(1) + 1
            mask = distance > 0
            if self.sliding_window and meta.causal:
                mask |= distance <= -self.sliding_window
            values = values.masked_fill(mask[:, :, None, None], 0)  # freed blocks may hold NaN
            attended = self._attend(
                query[rows].unsqueeze(1), keys, values, mask.unsqueeze(1), distance.unsqueeze(1)
            )
            output[rows] = attended.squeeze(1)

    def _prefill(
        self,
        request: int,
        query: torch.Tensor,
        kv_cache: Any,
        meta: PagedAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Compute one prefill in chunks of query tokens that keep the scores below MAX_ELEMENTS."""
        start, end = meta.query_start_loc[request], meta.query_start_loc[request + 1]
        seq_len = meta.seq_lens[request]
        if start == end or not seq_len:
            output[start:end] = 0
            return
        num_blocks = -(-seq_len // kv_cache[0].shape[1])
        blocks = meta.block_table[request : request + 1, :num_blocks]
        keys, values = (each[:, :seq_len] for each in self._gather(kv_cache, blocks))
        chunk = max(1, MAX_ELEMENTS // (seq_len * self.num_heads))
        positions = torch.arange(seq_len, device=query.device)
        images = (meta.mm_prefix_range or {}).get(request, ())
        # The position of a query token is its row in the batch plus this offset.
        context_len = seq_len - end
        for first in range(start, end, chunk):
            rows = slice(first, min(first + chunk, end))
            query_positions = positions[:1]
            visible = slice(0, seq_len)  # Keys that any token of the chunk attends to.
            if meta.causal:
                query_positions = positions[context_len + first : context_len + rows.stop]
                oldest = context_len + first - self.sliding_window + 1 if self.sliding_window else 0
                last = context_len + rows.stop - 1
                last = max([last, *(high for low, high in images if low <= last <= high)])
                visible = slice(max(0, oldest), min(last + 1, seq_len))
            distance = positions[visible] - query_positions.unsqueeze(1)
            mask = distance > 0 if meta.causal else torch.zeros_like(distance, dtype=torch.bool)
            for low, high in images:
                of_image = (positions >= low) & (positions <= high)
                mask &= ~(of_image[query_positions].unsqueeze(1) & of_image[visible])
            if self.sliding_window and meta.causal:
                mask |= distance <= -self.sliding_window
            attended = self._attend(
                query[rows][None], keys[:, visible], values[:, visible], mask[None], distance[None]
            )
            output[rows] = attended[0]

    def _gather(self, kv_cache: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[requests, tokens, kv_heads, head_size]`` in blocks ``[requests,
        blocks]``."""
        keys, values = (cache[blocks].flatten(1, 2) for cache in kv_cache)
        return keys, values

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        distance: torch.Tensor,
    ) -> torch.Tensor:
        """Compute softmax(scale * q k^T) v with the layer's soft cap, ALiBi and sinks.

        Args:
            query: ``[requests, tokens, heads, head_size]``.
            keys: ``[requests, seq_len, kv_heads, head_size]``.
            values: ``[requests, seq_len, kv_heads, head_size]``.
            mask: bool ``[requests, tokens, seq_len]``, True for excluded keys; one row may stand
                for all tokens.
            distance: int ``[requests, tokens, seq_len]``, position of the key minus position of the
                query token.
        """
        requests, tokens, heads, width = query.shape
        kv_heads, seq_len = keys.shape[2], keys.shape[1]
        # The query heads that share a key head become rows of one matmul.
        rows = query.float().view(requests, tokens, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        scores = rows.reshape(requests, kv_heads, -1, width) @ keys.float().permute(0, 2, 3, 1)
        scores = scores.mul_(self.scale).view(requests, heads, tokens, seq_len)
        if self.soft_cap:
            scores = scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.alibi_slopes is not None:
            slopes = _on_device(tuple(self.alibi_slopes), query.device)
            if self.alibi_sqrt:
                distance = distance.neg().clamp_(min=0).float().sqrt_().neg_()
            scores += slopes.view(1, -1, 1, 1) * distance.unsqueeze(1)
        scores = scores.masked_fill_(mask.unsqueeze(1), float("-inf"))
        # A sink is a score without a value: it only adds to the softmax's denominator.
        if self.sinks is not None:
            sinks = self.sinks.float().view(1, -1, 1, 1).expand(requests, -1, tokens, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(dim=-1)[..., :seq_len]
        attended = weights.reshape(requests, kv_heads, -1, seq_len) @ values.float().transpose(1, 2)
        return attended.view(requests, heads, tokens, -1).transpose(1, 2).to(query.dtype)


@functools.cache
def _on_device(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Constants of all layers, copied to the device once: float32 ``[values]``."""
    return torch.tensor(values, dtype=torch.float32, device=device)


class PagedAttentionBackend(AttentionBackendBase, AttentionBackend):
    """Built-in attention backend (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    impl_cls, builder_cls = PagedAttentionImpl, PagedAttentionMetadataBuilder
    block_sizes: ClassVar = [MultipleOf(16)]

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """Whether the bias of ALiBi may be proportional to the square root of the distance."""
        return True

    @classmethod
    def is_supported_on_current_device(cls, **sizes: Any) -> bool:
        """Whether keys and values may have heads of different sizes."""
        return True

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        """No-op: a cache's values have their own size."""

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        # The fused kernel's block size, so that prefix-cache hits do not depend on the backend.
        return 128
