"""Attention of encoders, of text and of images, by npu_fusion_attention: all requests' tokens in one call, without a cache.

Its limits are those of ``torch_npu/_op_plugin_docs.py``, layout TND: float16, bfloat16 and float32, heads of up to 768, at most
1024 sequences at a time.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform import extension
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

SEQUENCES_AT_ONCE = 1024
BAND_MASK_SIZE = 2048
"""Edge of the one mask that sparse_mode 4 wants for lengths of any size."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int], scale: float, **seen: Any) -> Any:
    """Attention of each sequence's tokens to all of its others, ``[tokens, heads, head_size]`` as query.

    Args:
        query: ``[tokens, heads, head_size]``; key and value have kv_heads.
        ends: where each sequence's tokens end, on the host.
        seen: the kernel's arguments that leave keys out.
    """
    parts, start = [], 0
    for first in range(0, len(ends), SEQUENCES_AT_ONCE):
        some = ends[first : first + SEQUENCES_AT_ONCE]
        own = [end - start for end in some]
        rows = slice(start, some[-1])
        tensors = [x[rows].contiguous() for x in (query, key, value)]
        named = {"scale": scale, "actual_seq_qlen": own, "actual_seq_kvlen": own} | seen
        parts.append(torch_npu.npu_fusion_attention(*tensors, query.shape[1], "TND", **named)[0])
        start = some[-1]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class FusedEncoderAttentionMetadata(AttentionMetadata):
    """One step's batch.

    ends: where each request's tokens end, on the host.
    mask: uint8 ``[2048, 2048]``, 1 above the diagonal.
    """

    ends: list[int]
    mask: torch.Tensor


class FusedEncoderAttentionMetadataBuilder(AttentionMetadataBuilder[FusedEncoderAttentionMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.mask = torch.ones(BAND_MASK_SIZE, BAND_MASK_SIZE, dtype=torch.uint8).triu_(1).to(device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FusedEncoderAttentionMetadata:
        common = common_attn_metadata
        return FusedEncoderAttentionMetadata(common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist(), self.mask)


class FusedEncoderAttentionImpl(extension.AttentionImplBase, AttentionImpl[FusedEncoderAttentionMetadata]):
    """The computation. A sliding window is to both sides, as ``vllm/v1/attention/backends/flash_attn.py`` has it."""

    title = "the fused attention of encoders of ascend-attention"
    serves = frozenset({extension.AttentionFeature.SLIDING_WINDOW, extension.AttentionFeature.ENCODER_ONLY})

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FusedEncoderAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: ``[tokens, heads, head_size]``; output has its shape and is written.
            key, value: ``[tokens, kv_heads, head_size]``.
            attn_metadata: None while vLLM profiles memory; the output is then zero.
        """
        if attn_metadata is None:
            return output.zero_()
        seen: dict[str, Any] = {}
        if self.sliding_window:
            reach = self.sliding_window - 1
            seen = {"atten_mask": attn_metadata.mask, "sparse_mode": 4, "pre_tockens": reach, "next_tockens": reach}
        tokens = attn_metadata.ends[-1]
        output[:tokens] = attend(query, key, value, attn_metadata.ends, self.scale, **seen)
        return output


class FusedEncoderAttentionBackend(extension.AttentionBackendBase, AttentionBackend):
    """What vLLM asks about the fused attention of encoders (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    impl_cls, builder_cls = FusedEncoderAttentionImpl, FusedEncoderAttentionMetadataBuilder
    block_sizes: ClassVar = [MultipleOf(1)]
    head_sizes = range(1, 769)


class FusedMMEncoderAttention(MMEncoderAttention):
    """Attention of the encoders of images and sounds; vLLM's own takes one sequence at a time."""

    def forward_oot(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query ``[batch, length, heads * head_size]``, or with heads and head_size apart, as key and value, and the output.

        With cu_seqlens, int ``[sequences + 1]``, the tokens of a batch of one are sequences one after another.
        """
        batch, length = query.shape[:2]
        ends = [*range(length, batch * length + 1, length)] if cu_seqlens is None else cu_seqlens[1:].tolist()
        rows = [x.reshape(-1, heads, self.head_size) for x, heads in ((query, self.num_heads), (key, self.num_kv_heads))]
        rows.append(value.reshape(-1, self.num_kv_heads, self.head_size))
        return attend(*rows, ends, self.scale).view(query.shape)
