"""The built-in attention: plain PyTorch over the paged cache, so that the platform serves without another wheel.

Dense attention (multi-head, grouped-query, multi-query) for prefill, chunked prefill, prefix-cache hits and decode in one
batch: causal, with a sliding window, sinks, a soft cap or ALiBi, or of a decoder to its encoder. It gathers keys and values
out of the pages and computes in float32; ascend-attention's fused kernel is what to use when speed matters.
"""

from dataclasses import dataclass
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

from ascend_platform.attention.base import AttentionBackendBase, AttentionFeature, AttentionImplBase, host_lengths
from ascend_platform.attention.kv_cache import KVCachePair

TITLE = "the built-in attention of ascend-platform"
ELEMENTS_AT_ONCE = 1 << 24
"""Bound on the scores, and on the gathered keys, that one step of the computation holds (64 MiB in float32)."""


@dataclass
class PagedAttentionMetadata(AttentionMetadata):
    """One step's batch. Requests of one token come first (``reorder_batch_threshold``).

    query_start: where each request's tokens begin, on the host, one entry more than requests.
    kv_lens: tokens of each request in the cache once this step's are written, on the host.
    block_table: int32 ``[requests, blocks]``.
    slot_mapping: int64, each new key's place in the cache; vLLM replaces it where an encoder's are written.
    singles: how many leading requests have one token.
    ends: int32 ``[singles]``, kv_lens on the device.
    longest: tokens in as many blocks as the longest of them needs.
    causal: False where every token sees all of its request's keys, which are an encoder's.
    """

    query_start: list[int]
    kv_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    singles: int
    ends: torch.Tensor
    longest: int
    causal: bool


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        """Lay out one step, on the host, without waiting for the device."""
        common, kv_lens = common_attn_metadata, host_lengths(common_attn_metadata, TITLE)
        query_start = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        singles = next((i for i, (start, end) in enumerate(pairwise(query_start)) if end - start != 1), len(kv_lens))
        size = self.kv_cache_spec.block_size
        longest = -(-max(kv_lens[:singles], default=0) // size) * size
        return PagedAttentionMetadata(
            query_start=query_start,
            kv_lens=kv_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping[: query_start[-1]],
            singles=singles,
            ends=common.seq_lens[:singles],
            longest=longest,
            causal=bool(common.causal),
        )


class PagedAttentionImpl(AttentionImplBase, AttentionImpl[PagedAttentionMetadata]):
    """The computation, in float32; the constructor is :class:`~ascend_platform.attention.base.AttentionImplBase`'s."""

    title = TITLE
    serves = frozenset(
        {
            AttentionFeature.ALIBI,
            AttentionFeature.SLIDING_WINDOW,
            AttentionFeature.LOGITS_SOFT_CAP,
            AttentionFeature.SINKS,
            AttentionFeature.ENCODER_DECODER,
        }
    )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCachePair,
        attn_metadata: PagedAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values into their pages and attend.

        Args:
            query: ``[tokens, heads, head_size]``; output has its shape and is written.
            key, value: ``[tokens, kv_heads, head_size]``; of an encoder, its new tokens, or None.
            attn_metadata: None while vLLM profiles memory, when there is no cache; the output is then zero.
        """
        if attn_metadata is None:
            return output.zero_()
        meta = attn_metadata
        if self.writes_cache and key is not None and value is not None:
            for pages, new in ((kv_cache.key, key), (kv_cache.value, value)):
                pages.view(-1, *pages.shape[2:])[meta.slot_mapping] = new[: len(meta.slot_mapping)]
        if meta.singles:
            self._decode(query, kv_cache, meta, output)
        for request in range(meta.singles, len(meta.kv_lens)):
            self._prefill(request, query, kv_cache, meta, output)
        return output

    def _decode(self, query: torch.Tensor, cache: KVCachePair, meta: PagedAttentionMetadata, output: torch.Tensor) -> None:
        """All requests of one token together, each padded to the longest; in groups when the pages are many."""
        blocks = meta.longest // cache.key.shape[1]
        group = max(1, ELEMENTS_AT_ONCE // max(1, meta.longest * cache.key.shape[2] * self.head_size))
        places = torch.arange(meta.longest, dtype=torch.int32, device=query.device)
        for first in range(0, meta.singles, group):
            rows = slice(first, min(first + group, meta.singles))
            keys, values = (pages[meta.block_table[rows, :blocks]].flatten(1, 2) for pages in cache)
            after = places - meta.ends[rows].unsqueeze(1) + 1  # 0 is the token's own place
            hidden = after > 0
            if self.sliding_window and meta.causal:
                hidden |= after <= -self.sliding_window
            values = values.masked_fill(hidden[:, :, None, None], 0)  # pages may hold a former owner's NaN
            attended = self._attend(query[rows].unsqueeze(1), keys, values, hidden.unsqueeze(1), after.unsqueeze(1))
            output[rows] = attended.squeeze(1)

    def _prefill(
        self, request: int, query: torch.Tensor, cache: KVCachePair, meta: PagedAttentionMetadata, output: torch.Tensor
    ) -> None:
        """One request of several tokens, in chunks of its tokens that keep the scores small."""
        start, end, length = meta.query_start[request], meta.query_start[request + 1], meta.kv_lens[request]
        if start == end or not length:
            output[start:end] = 0
            return
        blocks = -(-length // cache.key.shape[1])
        keys, values = (pages[meta.block_table[request, :blocks]].flatten(0, 1)[None, :length] for pages in cache)
        chunk = max(1, ELEMENTS_AT_ONCE // (length * self.num_heads))
        places = torch.arange(length, device=query.device)
        for first in range(start, end, chunk):
            rows = slice(first, min(first + chunk, end))
            own = places[length - end + first : length - end + rows.stop] if meta.causal else places[:1]
            seen = slice(0, length)  # keys that some of the chunk's tokens see
            if meta.causal:
                oldest = length - end + first - self.sliding_window + 1 if self.sliding_window else 0
                seen = slice(max(0, oldest), length - end + rows.stop)
            after = places[seen] - own.unsqueeze(1)
            hidden = after > 0 if meta.causal else torch.zeros_like(after, dtype=torch.bool)
            if self.sliding_window and meta.causal:
                hidden |= after <= -self.sliding_window
            output[rows] = self._attend(query[rows][None], keys[:, seen], values[:, seen], hidden[None], after[None])[0]

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor:
        """softmax(scale * q k^T) v with what the layer has of soft cap, ALiBi and sinks.

        Args:
            query: ``[requests, tokens, heads, head_size]``.
            keys, values: ``[requests, length, kv_heads, head_size]``.
            hidden: bool ``[requests, tokens, length]``, or of one row for all tokens.
            after: int ``[requests, tokens, length]``, how far a key is behind its token, negative before it.
        """
        requests, tokens, heads, width = query.shape
        kv_heads, length = keys.shape[2], keys.shape[1]
        # the query heads that share a key head become rows of one product
        rows = query.float().view(requests, tokens, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        scores = rows.reshape(requests, kv_heads, -1, width) @ keys.float().permute(0, 2, 3, 1)
        scores = scores.mul_(self.scale).view(requests, heads, tokens, length)
        if self.soft_cap:
            scores = scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.alibi_slopes is not None:
            slopes = torch.tensor(self.alibi_slopes, dtype=torch.float32, device=query.device)
            scores += slopes.view(1, -1, 1, 1) * after.unsqueeze(1)
        scores = scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
        if self.sinks is not None:  # a score of no key, which only takes part in the sum
            none = self.sinks.float().view(1, -1, 1, 1).expand(requests, -1, tokens, 1)
            scores = torch.cat([scores, none], -1)
        weights = scores.softmax(dim=-1)[..., :length]
        attended = weights.reshape(requests, kv_heads, -1, length) @ values.float().transpose(1, 2)
        return attended.view(requests, heads, tokens, -1).transpose(1, 2).to(query.dtype)


class PagedAttentionBackend(AttentionBackendBase, AttentionBackend):
    """What vLLM asks about the built-in attention (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    impl_cls, builder_cls = PagedAttentionImpl, PagedAttentionMetadataBuilder
    block_sizes: ClassVar = [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return 128  # as the fused kernel has it, so that prefix-cache hits do not depend on the backend
