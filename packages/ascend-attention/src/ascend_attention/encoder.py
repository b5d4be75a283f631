# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Encoder attention of text and multimodal models with npu_fusion_attention: variable-length
sequences without a KV cache.

Limits of the kernel in layout TND (``torch_npu/_op_plugin_docs.py``): float16, bfloat16 and
float32, head sizes up to 768, at most 1024 sequences per call.
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

from ascend_attention.metadata import upper_triangle

MAX_SEQUENCES = 1024
"""Sequences per kernel call."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: list[int],
    scale: float,
    **mask_args: Any,
) -> torch.Tensor:
    """Compute bidirectional attention within each sequence; returns ``[tokens, heads, head_size]``.

    Args:
        query: ``[tokens, heads, head_size]``; key and value have kv_heads.
        cu_seqlens: cumulative sequence lengths on the host, without the leading 0.
        mask_args: the kernel's mask arguments.
    """
    outputs, start = [], 0
    for first in range(0, len(cu_seqlens), MAX_SEQUENCES):
        chunk = cu_seqlens[first : first + MAX_SEQUENCES]
        lengths = [end - start for end in chunk]
        rows = slice(start, chunk[-1])
        tensors = [x[rows].contiguous() for x in (query, key, value)]
        arguments = {
            "scale": scale,
            "actual_seq_qlen": lengths,
            "actual_seq_kvlen": lengths,
        } | mask_args
        outputs.append(
            torch_npu.npu_fusion_attention(*tensors, query.shape[1], "TND", **arguments)[0]
        )
        start = chunk[-1]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass
class FusedEncoderAttentionMetadata(AttentionMetadata):
    """Metadata of one step.

    Attributes:
        cu_seqlens: cumulative sequence lengths on the host, without the leading 0.
        mask: uint8 ``[2048, 2048]``, 1 above the diagonal.
    """

    cu_seqlens: list[int]
    mask: torch.Tensor


class FusedEncoderAttentionMetadataBuilder(AttentionMetadataBuilder[FusedEncoderAttentionMetadata]):
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.mask = upper_triangle(torch.uint8, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FusedEncoderAttentionMetadata:
        common = common_attn_metadata
        return FusedEncoderAttentionMetadata(
            common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist(), self.mask
        )


class FusedEncoderAttentionImpl(
    extension.AttentionImplBase, AttentionImpl[FusedEncoderAttentionMetadata]
):
    """Fused encoder-only attention. A sliding window extends to both sides
    (``vllm/v1/attention/backends/flash_attn.py``)."""

    title = "the fused encoder-only attention of ascend-attention"
    serves = frozenset(
        {extension.AttentionFeature.SLIDING_WINDOW, extension.AttentionFeature.ENCODER_ONLY}
    )
    operators = ("npu_fusion_attention",)

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Any,
        meta: FusedEncoderAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Compute all sequences by one operator; see the base class."""
        mask_args: dict[str, Any] = {}
        if self.sliding_window:
            width = self.sliding_window - 1
            mask_args = {
                "atten_mask": meta.mask,
                "sparse_mode": 4,
                "pre_tockens": width,
                "next_tockens": width,
            }
        num_tokens = meta.cu_seqlens[-1]
        output[:num_tokens] = attend(query, key, value, meta.cu_seqlens, self.scale, **mask_args)


class FusedEncoderAttentionBackend(extension.AttentionBackendBase, AttentionBackend):
    """Fused encoder-only attention backend (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    impl_cls, builder_cls = FusedEncoderAttentionImpl, FusedEncoderAttentionMetadataBuilder
    block_sizes: ClassVar = [MultipleOf(1)]
    head_sizes = range(1, 769)


def host_ends(cu_seqlens: torch.Tensor) -> list[int]:
    """Cumulative sequence lengths on the host, without the leading 0. They are copied once, because
    all layers of a forward pass get the same tensor."""
    if not hasattr(cu_seqlens, "host_ends"):
        cu_seqlens.host_ends = cu_seqlens[1:].tolist()
    return cu_seqlens.host_ends


class FusedMMEncoderAttention(MMEncoderAttention):
    """Attention of vision and audio encoders with all sequences in one call; vLLM's native one
    loops over them."""

    operators = ("npu_fusion_attention",)
    in_graphs = True
    """Graphs of encoders may contain it."""

    @classmethod
    def maybe_recompute_cu_seqlens(
        cls, attn_backend: Any, cu_seqlens: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """vLLM's tensor on the device, with the sequence lengths that the host knows."""
        on_device = super().maybe_recompute_cu_seqlens(attn_backend, cu_seqlens, *args, **kwargs)
        on_device.host_ends = cu_seqlens[1:].tolist()
        return on_device

    def forward_oot(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention; query, key, value and the output are ``[batch, length, heads *
        head_size]``, or 4-dimensional.

        Args:
            cu_seqlens: int ``[sequences + 1]``, cumulative sequence lengths of a packed batch of
                one. In a graph it is one of the graph's buffers.
        """
        batch, length = query.shape[:2]
        kv_shape = (-1, self.num_kv_heads, self.head_size)
        queries = query.reshape(-1, self.num_heads, self.head_size)
        keys, values = key.reshape(kv_shape), value.reshape(kv_shape)
        if extension.is_captured():
            given = _GraphSequences(batch, length, cu_seqlens)
            return given.attend(queries, keys, values, self.scale).view(query.shape)
        ends = (
            [*range(length, batch * length + 1, length)]
            if cu_seqlens is None
            else host_ends(cu_seqlens)
        )
        return attend(queries, keys, values, ends, self.scale).view(query.shape)


class _GraphSequences:
    """The sequences of an attention call in a graph, which each replay reads from the buffer.

    The call has as many sequences as the buffer holds, less than MAX_SEQUENCES. Those at the
    end take no part, with 0 as their end (``npu_fusion_attention_v3`` in
    ``torch_npu/_op_plugin_docs.py``), and the rows behind the last of the others as well.

    Raises:
        RefusedError: the ends are not known to the host.
    """

    def __init__(self, batch: int, length: int, cu_seqlens: torch.Tensor | None) -> None:
        if cu_seqlens is None:
            # Of constant length: what is captured is right in each replay.
            cu_seqlens = torch.arange(0, batch * length + 1, length)
        elif not hasattr(cu_seqlens, "host_ends"):
            raise extension.RefusedError(
                "an encoder computes the sequence ends of its attention on the device; fix: leave out"
                " cudagraph_mm_encoder"
            )
        self._cu_seqlens = cu_seqlens
        self._count = min(len(cu_seqlens), MAX_SEQUENCES)

    def arguments(self) -> dict[str, Any] | None:
        """The kernel's host arguments; None if there are too many sequences."""
        buffer = self._cu_seqlens
        if not hasattr(buffer, "graph_arguments"):  # All layers have the same buffer.
            ends = [end for end in dict.fromkeys(host_ends(buffer)) if end]
            fits = len(ends) < self._count
            buffer.graph_arguments = self._padded(ends) if fits else None
        return buffer.graph_arguments

    def _padded(self, ends: list[int]) -> dict[str, Any]:
        padded = torch.tensor(ends + [0] * (self._count - len(ends)))
        return {"actual_seq_qlen": padded, "actual_seq_kvlen": padded}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As :func:`attend`; captured with one sequence of all rows, for which the workspace is
        largest."""
        tensors = [x.contiguous() for x in (query, key, value)]
        with extension.graph_task(self.arguments):
            return torch_npu.npu_fusion_attention_v3(
                *tensors, query.shape[1], "TND", scale=scale, **self._padded([len(query)])
            )[0]
