# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Built-in encoder-only attention (BERT and others): PyTorch, bidirectional within each request.

There is no KV cache, and vLLM schedules an encoder's prompts without chunking
(``vllm/model_executor/layers/attention/encoder_only_attention.py``).
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

from ascend_platform.attention.base import AttentionBackendBase, AttentionFeature
from ascend_platform.attention.paged import MAX_ELEMENTS, PagedAttentionImpl


@dataclass
class EncoderAttentionMetadata(AttentionMetadata):
    """Metadata of one step: ``query_start_loc``, the start of each request's tokens on the host,
    ``requests + 1`` entries."""

    query_start_loc: list[int]


class EncoderAttentionMetadataBuilder(AttentionMetadataBuilder[EncoderAttentionMetadata]):
    # vLLM's constructor is abstract
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> EncoderAttentionMetadata:
        common = common_attn_metadata
        return EncoderAttentionMetadata(common.query_start_loc_cpu[: common.num_reqs + 1].tolist())


class EncoderAttentionImpl(PagedAttentionImpl, AttentionImpl[EncoderAttentionMetadata]):
    """Built-in encoder-only attention. A sliding window extends to both sides
    (``vllm/v1/attention/backends/flash_attn.py``)."""

    title = "the built-in encoder-only attention of ascend-platform"
    serves = frozenset({AttentionFeature.SLIDING_WINDOW, AttentionFeature.ENCODER_ONLY})

    def write(self, layer: Any, key: Any, value: Any, kv_cache: Any, meta: Any) -> None:
        """No-op: encoders have no KV cache."""

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        meta: Any,
        output: torch.Tensor,
    ) -> None:
        """Compute one sequence after the other, in chunks that keep the scores below
        MAX_ELEMENTS."""
        for start, end in pairwise(meta.query_start_loc):
            positions = torch.arange(end - start, device=query.device)
            keys, values = key[None, start:end], value[None, start:end]
            chunk = max(1, MAX_ELEMENTS // max(1, (end - start) * self.num_heads))
            for first in range(start, end, chunk):
                rows = slice(first, min(first + chunk, end))
                own = positions[rows.start - start : rows.stop - start]
                distance = (positions - own.unsqueeze(1))[None]
                mask = distance.abs() >= (self.sliding_window or end - start)
                output[rows] = self._attend(query[rows][None], keys, values, mask, distance)[0]


class EncoderAttentionBackend(AttentionBackendBase, AttentionBackend):
    """Built-in encoder-only attention backend (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    impl_cls, builder_cls = EncoderAttentionImpl, EncoderAttentionMetadataBuilder
    block_sizes: ClassVar = [MultipleOf(1)]
