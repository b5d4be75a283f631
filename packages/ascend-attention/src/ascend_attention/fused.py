"""Dense causal attention by npu_fused_infer_attention_score over the paged cache.

Its arguments, dtypes and limits are those of ``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel; the cache is
written by npu_scatter_pa_kv_cache, documented there for Atlas A2 and A3.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform import extension
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from ascend_attention import int8_cache

TITLE = "the fused attention of ascend-attention"
BLOCK_SIZE = 128
"""Tokens per page: what the kernel takes for prefill and decode alike, and the size its documentation recommends."""

CAUSAL_MASK_SIZE = 2048
"""Edge of the one mask that sparse_mode 3 wants for lengths of any size."""


class FusedAttentionBackend(extension.DenseBackend, AttentionBackend):
    """What vLLM asks about the fused attention (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16]

    @staticmethod
    def get_impl_cls() -> type["FusedAttentionImpl"]:
        return FusedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["FusedAttentionMetadataBuilder"]:
        return FusedAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [BLOCK_SIZE]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0 and head_size <= 256


@dataclass
class FusedAttentionMetadata(AttentionMetadata):
    """One step's batch, the same for all layers.

    query_ends: where each request's tokens end among the step's, on the host; the last is their number.
    kv_lens: tokens of each request in the cache once this step's are written, on the host.
    block_table: int32 ``[requests, blocks]``.
    slot_mapping: int64 ``[tokens]``, each new token's place in the cache.
    mask: int8 ``[2048, 2048]``, 1 above the diagonal.
    log_sums: float32 ``[1]``, what the kernel wants for the second output that we do not ask for.
    """

    query_ends: list[int]
    kv_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    mask: torch.Tensor
    log_sums: torch.Tensor


class FusedAttentionMetadataBuilder(AttentionMetadataBuilder[FusedAttentionMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        ones = torch.ones(CAUSAL_MASK_SIZE, CAUSAL_MASK_SIZE, dtype=torch.int8)
        self.mask = ones.triu_(1).to(device)
        self.log_sums = torch.empty(1, dtype=torch.float32, device=device)
        if kv_cache_spec.dtype == torch.int8:
            self._init_reorder_batch_threshold(1)  # int8_cache wants requests of one token first

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FusedAttentionMetadata:
        """Lay out one step, on the host, without waiting for the device."""
        common, kv_lens = common_attn_metadata, extension.host_lengths(common_attn_metadata, TITLE)
        query_ends = common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist()
        return FusedAttentionMetadata(
            query_ends=query_ends,
            kv_lens=kv_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping[: query_ends[-1]],
            mask=self.mask,
            log_sums=self.log_sums,
        )


class FusedAttentionImpl(extension.DenseImpl, AttentionImpl[FusedAttentionMetadata]):
    """The computation, by the kernel; the constructor is ``extension.DenseImpl``'s."""

    title = TITLE
    int8_cache = True

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        attn_metadata: FusedAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values into their pages and attend.

        Args:
            query: ``[tokens, heads, head_size]``; output has its shape and is written.
            key, value: ``[tokens, kv_heads, head_size]``.
            kv_cache: keys and values, each ``[blocks, 128, kv_heads, head_size]``, contiguous.
            attn_metadata: None while vLLM profiles memory, when there is no cache; the output is then zero.
        """
        if attn_metadata is None:
            return output.zero_()
        meta, (keys, values) = attn_metadata, kv_cache
        tokens = meta.query_ends[-1]
        small = keys.dtype == torch.int8
        if self.writes_cache and small:
            int8_cache.write(layer, key[:tokens], value[:tokens], keys, values, meta.slot_mapping)
        elif self.writes_cache:
            # vLLM cuts value out of the joint projection of query, key and value; the kernel wants it contiguous
            torch_npu.npu_scatter_pa_kv_cache(
                key[:tokens].contiguous(),
                value[:tokens].contiguous(),
                keys,
                values,
                meta.slot_mapping,
                cache_mode="Norm",
            )
        if small:
            int8_cache.attend(self, layer, query, keys, values, meta, output)
        else:
            self.attend(query[:tokens], keys, values, meta.query_ends, meta.kv_lens, meta.block_table, meta, output[:tokens])
        return output

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        query_ends: list[int],
        kv_lens: list[int],
        block_table: torch.Tensor,
        meta: FusedAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Write attention's output for these requests; keys and values are pages of the query's dtype."""
        torch_npu.npu_fused_infer_attention_score.out(
            query.contiguous(),
            keys.view(*keys.shape[:2], -1),
            values.view(*values.shape[:2], -1),
            atten_mask=meta.mask,
            actual_seq_lengths=query_ends,
            actual_seq_lengths_kv=kv_lens,
            block_table=block_table,
            block_size=keys.shape[1],
            num_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            scale=self.scale,
            input_layout="TND",
            sparse_mode=3,
            out=[output, meta.log_sums],
        )
