"""Attention over an int8 KV cache.

The kernel reads int8 blocks only with one query token per request (``torch_npu/_op_plugin_docs.py``,
npu_fused_infer_attention_score: key_antiquant_scale and Q_S). For prefills the blocks are dequantized to the model's dtype first.
Stored values are round(value / scale + offset), with one scale and offset per channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu

from ascend_attention.metadata import FusedAttentionMetadata


def write(
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Quantize keys and values ``[tokens, kv_heads, head_size]`` into caches ``[blocks, 128, kv_heads, head_size]``."""

    def quantize(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
        offset = None if offset is None else offset.float()
        return torch_npu.npu_quantize(x.flatten(1), 1 / scale.float(), offset, torch.qint8, -1, False).view(x.shape)

    int8_key = quantize(key, layer.k_cache_scale, layer.k_cache_offset)
    int8_value = quantize(value, layer.v_cache_scale, layer.v_cache_offset)
    torch_npu.npu_scatter_pa_kv_cache(int8_key, int8_value, key_cache, value_cache, slot_mapping, cache_mode="Norm")


def count_decodes(cu_query_lens: list[int]) -> int:
    """Number of leading requests with one query token."""
    return next((i for i, end in enumerate(cu_query_lens) if end != i + 1), len(cu_query_lens))


def attend(
    impl: Any,
    layer: Any,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    meta: FusedAttentionMetadata,
    output: torch.Tensor,
) -> None:
    """Write the attention output ``[tokens, heads, head_size]`` from int8 caches.

    Args:
        impl: a FusedAttentionImpl.
        layer: vLLM's Attention layer, with the scales and offsets.
    """
    cu_query_lens, seq_lens = meta.lengths["actual_seq_lengths"], meta.lengths["actual_seq_lengths_kv"]
    num_decodes = count_decodes(cu_query_lens)
    if num_decodes:
        _decode(impl, layer, query[:num_decodes], key_cache, value_cache, meta, output[:num_decodes])
    if num_decodes < len(cu_query_lens):
        prefills = slice(num_decodes, None)
        max_blocks = -(-max(seq_lens[prefills]) // key_cache.shape[1])
        block_table = meta.block_table[prefills, :max_blocks]
        # the dequantized blocks are a new cache in the order of the block table
        renumbered = torch.arange(block_table.numel(), dtype=block_table.dtype, device=block_table.device)
        caches = [
            _dequantize(cache.index_select(0, block_table.flatten()), scale, offset, query.dtype)
            for cache, scale, offset in (
                (key_cache, layer.k_cache_scale, layer.k_cache_offset),
                (value_cache, layer.v_cache_scale, layer.v_cache_offset),
            )
        ]
        tokens = slice(num_decodes, cu_query_lens[-1])
        lengths = {
            "actual_seq_lengths": [end - num_decodes for end in cu_query_lens[prefills]],
            "actual_seq_lengths_kv": seq_lens[prefills],
        }
        impl.attend(query[tokens], *caches, lengths, renumbered.view(block_table.shape), meta, output[tokens])


def _dequantize(blocks: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    values = blocks.flatten(2).float()
    if offset is not None:
        values = values - offset
    return (values * scale).to(dtype).view(blocks.shape)


def _decode(
    impl: Any,
    layer: Any,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    meta: FusedAttentionMetadata,
    output: torch.Tensor,
) -> None:
    num_decodes = len(query)

    def per_channel(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return None if parameter is None else parameter.view(impl.num_kv_heads, 1, -1)

    # the kernel adds the offsets, and requires both or neither
    offsets = [layer.k_cache_offset, layer.v_cache_offset]
    if any(offset is not None for offset in offsets):
        offsets = [torch.zeros_like(layer.k_cache_scale) if offset is None else -offset for offset in offsets]
    attended, _ = torch_npu.npu_fused_infer_attention_score(
        query.contiguous().unsqueeze(2),
        key_cache.flatten(2),
        value_cache.flatten(2),
        actual_seq_lengths_kv=meta.lengths["actual_seq_lengths_kv"][:num_decodes],
        block_table=meta.block_table[:num_decodes],
        block_size=key_cache.shape[1],
        num_heads=impl.num_heads,
        num_key_value_heads=impl.num_kv_heads,
        scale=impl.scale,
        input_layout="BNSD",
        key_antiquant_scale=per_channel(layer.k_cache_scale),
        key_antiquant_offset=per_channel(offsets[0]),
        value_antiquant_scale=per_channel(layer.v_cache_scale),
        value_antiquant_offset=per_channel(offsets[1]),
    )
    output.copy_(attended.squeeze(2))
