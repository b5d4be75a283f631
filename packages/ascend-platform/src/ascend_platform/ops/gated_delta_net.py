# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Qwen's gated delta net with fewer launches than vLLM's layer, and without host
synchronizations."""

from typing import Any

import torch
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)


class NPUGDNAttentionMetadataBuilder(GDNAttentionMetadataBuilder):
    """vLLM's builder, which gives a prefill the indices of new requests."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> GDNAttentionMetadata:
        """vLLM's layers clear the states of ``~prefill_has_initial_state``. With a mask torch_npu
        waits for the device in each layer; the complement of indices is the complement of their
        bits."""
        built = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        if built.num_prefills:
            common = common_attn_metadata
            is_new = common.seq_lens_cpu_upper_bound <= common.query_start_loc_cpu.diff()
            if built.spec_sequence_masks_cpu is not None:
                is_new = is_new[~built.spec_sequence_masks_cpu]
            assert built.prefill_state_indices is not None
            rows = is_new[-len(built.prefill_state_indices) :].nonzero().flatten()
            built.prefill_has_initial_state = async_tensor_h2d(~rows, device=self.device)
        return built


class NPUGDNAttentionBackend(GDNAttentionBackend):
    """vLLM's backend with the builder above."""

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        """Its builder."""
        return NPUGDNAttentionMetadataBuilder


class NPUGatedDeltaNetAttention(qwen_gdn_linear_attn.QwenGatedDeltaNetAttention):
    """vLLM's layer, which would normalize with a Triton kernel if there are draft tokens."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.enable_fused_gdn_spec_decode = False
        self._columns: list[torch.Tensor] = []

    def get_attn_backend(self) -> type[GDNAttentionBackend]:
        """Backend of the metadata."""
        return NPUGDNAttentionBackend

    def _warmup_prefill_kernels(self, qkv_or_qkvz: Any, v_dim: int) -> None:
        """Nothing to warm up."""

    def _flat_columns(self, device: torch.device) -> list[torch.Tensor]:
        """Columns of Qwen3-Next's projections, which are interleaved by key head, in the order of
        Qwen3.5's: queries, keys, values, gates; strengths, decays."""
        if not self._columns:
            heads, values = self.num_k_heads // self.tp_size, self.num_v_heads // self.num_k_heads
            for sizes in (
                [self.head_k_dim] * 2 + [values * self.head_v_dim] * 2,
                [values] * 2,
            ):
                columns = torch.arange(heads * sum(sizes)).view(heads, -1)
                parts = columns.split(sizes, 1)
                self._columns.append(torch.cat([part.flatten() for part in parts]).to(device))
        return self._columns

    def forward_cuda(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """vLLM's layer, which copies each part of Qwen3-Next's projections; one gather orders them
        all."""
        projected, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        if self.gqa_interleaved_layout:
            of_qkvz, of_ba = self._flat_columns(hidden_states.device)
            projected, ba = projected.index_select(1, of_qkvz), ba.index_select(1, of_ba)
        width = (2 * self.key_dim + self.value_dim) // self.tp_size
        mixed, z = projected[:, :width], projected[:, width:]
        z = z.unflatten(-1, (-1, self.head_v_dim))
        output = torch.zeros(z.shape, dtype=z.dtype, device=z.device)
        torch.ops.vllm.qwen_gdn_attention_core(
            mixed,
            *self.split_ba(ba),
            output,
            layer_name=qwen_gdn_linear_attn._encode_layer_name(self.prefix),
        )
        return self._output_projection(output, z)
