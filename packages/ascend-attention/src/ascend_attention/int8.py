"""Attention over keys and values that pages hold in int8.

The kernel reads int8 pages for one query token of each request alone (``torch_npu/_op_plugin_docs.py``,
npu_fused_infer_attention_score: key_antiquant_scale and Q_S). For requests of more tokens the pages that they have are made
into the model's dtype first. A stored x is round(value / scale + offset), one scale and offset for each channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu

from ascend_attention.metadata import FusedAttentionMetadata


def write(layer: Any, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: Any) -> None:
    """Quantize a step's keys and values ``[tokens, kv_heads, head_size]`` into pages ``[blocks, 128, kv_heads, head_size]``."""

    def quantized(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
        offset = None if offset is None else offset.float()
        return torch_npu.npu_quantize(x.flatten(1), 1 / scale.float(), offset, torch.qint8, -1, False).view(x.shape)

    small_keys = quantized(key, layer.k_cache_scale, layer.k_cache_offset)
    small_values = quantized(value, layer.v_cache_scale, layer.v_cache_offset)
    torch_npu.npu_scatter_pa_kv_cache(small_keys, small_values, keys, values, slots, cache_mode="Norm")


def singles(query_ends: list[int]) -> int:
    """How many leading requests have one token."""
    return next((i for i, end in enumerate(query_ends) if end != i + 1), len(query_ends))


def attend(
    impl: Any,
    layer: Any,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: FusedAttentionMetadata,
    output: torch.Tensor,
) -> None:
    """Write attention's output, ``[tokens, heads, head_size]`` as query, from int8 pages; impl is a FusedAttentionImpl."""
    query_ends, kv_lens = meta.lengths["actual_seq_lengths"], meta.lengths["actual_seq_lengths_kv"]
    first = singles(query_ends)
    if first:
        _decode(impl, layer, query[:first], keys, values, meta, output[:first])
    if first < len(query_ends):
        rows = slice(first, None)
        most = -(-max(kv_lens[rows]) // keys.shape[1])
        table = meta.block_table[rows, :most]
        tables = torch.arange(table.numel(), dtype=table.dtype, device=table.device).view(table.shape)
        pages = [
            _numbers(cache.index_select(0, table.flatten()), scale, offset, query.dtype)
            for cache, scale, offset in (
                (keys, layer.k_cache_scale, layer.k_cache_offset),
                (values, layer.v_cache_scale, layer.v_cache_offset),
            )
        ]
        tokens = slice(first, query_ends[-1])
        ends = [end - first for end in query_ends[rows]]
        lengths = {"actual_seq_lengths": ends, "actual_seq_lengths_kv": kv_lens[rows]}
        impl.attend(query[tokens], *pages, lengths, tables, meta, output[tokens])


def _numbers(pages: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    numbers = pages.flatten(2).float()
    if offset is not None:
        numbers = numbers - offset
    return (numbers * scale).to(dtype).view(pages.shape)


def _decode(
    impl: Any,
    layer: Any,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: FusedAttentionMetadata,
    output: torch.Tensor,
) -> None:
    requests = len(query)

    def channels(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return None if parameter is None else parameter.view(impl.num_kv_heads, 1, -1)

    # the kernel adds the offsets, and wants both or neither
    offsets = [layer.k_cache_offset, layer.v_cache_offset]
    if any(offset is not None for offset in offsets):
        offsets = [torch.zeros_like(layer.k_cache_scale) if offset is None else -offset for offset in offsets]
    attended, _ = torch_npu.npu_fused_infer_attention_score(
        query.contiguous().unsqueeze(2),
        keys.view(*keys.shape[:2], -1),
        values.view(*values.shape[:2], -1),
        actual_seq_lengths_kv=meta.lengths["actual_seq_lengths_kv"][:requests],
        block_table=meta.block_table[:requests],
        block_size=keys.shape[1],
        num_heads=impl.num_heads,
        num_key_value_heads=impl.num_kv_heads,
        scale=impl.scale,
        input_layout="BNSD",
        key_antiquant_scale=channels(layer.k_cache_scale),
        key_antiquant_offset=channels(offsets[0]),
        value_antiquant_scale=channels(layer.v_cache_scale),
        value_antiquant_offset=channels(offsets[1]),
    )
    output.copy_(attended.squeeze(2))
