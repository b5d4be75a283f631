# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention over an int8 KV cache.

The kernel reads int8 blocks only with one query token per request
(``torch_npu/_op_plugin_docs.py``, npu_fused_infer_attention_score: key_antiquant_scale and Q_S).
For prefills the blocks are dequantized to the model's dtype first, into a workspace of bounded
size: requests whose blocks do not fit together run one after another, longer ones in slices. Stored
values are round(value / scale + offset), with one scale and offset per channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_npu
from ascend_platform import extension

from ascend_attention import unpaged
from ascend_attention.context import merge
from ascend_attention.metadata import FusedAttentionMetadata, longest_lengths


def write(
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Quantize keys and values ``[tokens, kv_heads, head_size]`` into caches ``[blocks, 128,
    kv_heads, head_size]``."""

    def quantize(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
        offset = None if offset is None else offset.float()
        return torch_npu.npu_quantize(
            x.flatten(1), 1 / scale.float(), offset, torch.qint8, -1, False
        ).view(x.shape)

    int8_key = quantize(key, layer.k_cache_scale, layer.k_cache_offset)
    int8_value = quantize(value, layer.v_cache_scale, layer.v_cache_offset)
    torch_npu.npu_scatter_pa_kv_cache(
        int8_key, int8_value, key_cache, value_cache, slot_mapping, cache_mode="Norm"
    )


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
    num_decodes, cu_query_lens = meta.num_decodes, meta.lengths["actual_seq_lengths"]
    if num_decodes:
        _decode(
            impl, layer, query[:num_decodes], key_cache, value_cache, meta, output[:num_decodes]
        )
    if num_decodes == len(cu_query_lens):
        return
    if meta.long:

        def read(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = unpaged.reader(key_cache, value_cache)(slots)
            keys, values = _dequantize(layer, keys, values, query.dtype)
            return keys, values

        later = slice(num_decodes, None)
        unpaged.attend(impl, query[later], read, meta.long, output[later])
        return
    starts, seq_lens = [0, *cu_query_lens], meta.lengths["actual_seq_lengths_kv"]
    block_size = key_cache.shape[1]
    capacity = _workspace_blocks(len(query), block_size)
    blocks = [-(-length // block_size) for length in seq_lens]
    for first, last in group_prefills(blocks, num_decodes, capacity):
        rows, tokens = slice(first, last), slice(starts[first], starts[last])

        def dequantize(
            columns: slice, rows: slice = rows
        ) -> tuple[list[torch.Tensor], torch.Tensor]:
            table = meta.block_table[rows, columns]
            keys, values = (
                cache.index_select(0, table.flatten()) for cache in (key_cache, value_cache)
            )
            return _dequantize(layer, keys, values, query.dtype), _renumber(table)

        most = max(blocks[rows])
        if most <= capacity:
            caches, table = dequantize(slice(most))
            lengths = {
                "actual_seq_lengths": [end - tokens.start for end in cu_query_lens[rows]],
                "actual_seq_lengths_kv": seq_lens[rows],
            }
            impl.attend_pages(query[tokens], *caches, lengths, table, meta, output[tokens])
        else:
            _prefill_in_slices(
                impl,
                query[tokens],
                seq_lens[first],
                block_size,
                capacity,
                dequantize,
                meta,
                output[tokens],
            )


WORKSPACE_TOKENS = 4096
"""Tokens of dequantized keys and values in the workspace; more if a step has more new tokens."""


def _workspace_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks in the workspace: the new tokens of one request, with those before them in their first
    block."""
    return -(-max(num_tokens, WORKSPACE_TOKENS) // block_size) + 1


def reserve(impl: Any, query: torch.Tensor, block_size: int) -> None:
    """Allocate and free what a prefill of these tokens allocates, so that it is in the profiled
    peak of memory."""
    shape = _workspace_blocks(len(query), block_size), block_size, impl.num_kv_heads, impl.head_size
    workspace = [
        torch.empty(shape, dtype=dtype, device=query.device)
        for dtype in (query.dtype, query.dtype, torch.int8)
    ]
    # The output of a slice, and the merged outputs before and after it.
    workspace += [torch.empty_like(query, dtype=torch.float32) for _ in range(3)]
    workspace.clear()


def group_prefills(blocks: list[int], first: int, capacity: int) -> Iterator[tuple[int, int]]:
    """Ranges of requests whose blocks fit into the workspace together, padded to the longest; a
    longer request has a range of its own."""
    start = first
    for end in range(first + 1, len(blocks) + 1):
        if end == len(blocks) or (end + 1 - start) * max(blocks[start : end + 1]) > capacity:
            yield start, end
            start = end


def _prefill_in_slices(
    impl: Any,
    query: torch.Tensor,
    seq_len: int,
    block_size: int,
    capacity: int,
    dequantize: Callable[[slice], tuple[list[torch.Tensor], torch.Tensor]],
    meta: FusedAttentionMetadata,
    output: torch.Tensor,
) -> None:
    """Attention of one request whose blocks exceed the workspace: slices of its context, then the
    blocks with its new tokens.

    npu_attention_update merges the outputs by their softmax_lse (``torch_npu/_op_plugin_docs.py``).
    """
    first_new = (seq_len - len(query)) // block_size
    causal: dict[str, Any] = {"atten_mask": meta.mask, "sparse_mode": 3}
    slices: list[tuple[int, int, dict[str, Any]]] = [
        (start, min(start + capacity, first_new), {"sparse_mode": 0})
        for start in range(0, first_new, capacity)
    ]
    merged: tuple[torch.Tensor, ...] = ()
    for start, end, mask in [*slices, (first_new, -(-seq_len // block_size), causal)]:
        (keys, values), table = dequantize(slice(start, end))
        part, softmax_lse = torch_npu.npu_fused_infer_attention_score(
            query.contiguous(),
            keys.flatten(2),
            values.flatten(2),
            block_table=table,
            block_size=block_size,
            input_layout="TND",
            softmax_lse_flag=True,
            actual_seq_lengths=[len(query)],
            actual_seq_lengths_kv=[min(end * block_size, seq_len) - start * block_size],
            **mask,
            **impl._head_args(),
        )
        del keys, values
        part, softmax_lse = part.flatten(0, 1).float(), softmax_lse.flatten()
        merged = (
            merge([merged[1], softmax_lse], [merged[0], part]) if merged else (part, softmax_lse)
        )
        del part
    output.copy_(merged[0].view_as(output))


def _renumber(block_table: torch.Tensor) -> torch.Tensor:
    """The block table of dequantized blocks, which are in the order of the block table."""
    return torch.arange(
        block_table.numel(), dtype=block_table.dtype, device=block_table.device
    ).view(block_table.shape)


def _dequantize(
    layer: Any, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """int8 keys and values ``[..., kv_heads, head_size]`` in the model's dtype."""

    def one(rows: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
        offset = None if offset is None else -offset.float()  # the operator adds it
        return torch_npu.npu_anti_quant(
            rows.flatten(-2), scale.float(), offset=offset, dst_dtype=dtype
        ).view(rows.shape)

    return [
        one(keys, layer.k_cache_scale, layer.k_cache_offset),
        one(values, layer.v_cache_scale, layer.v_cache_offset),
    ]


def _decode(
    impl: Any,
    layer: Any,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    meta: FusedAttentionMetadata,
    output: torch.Tensor,
) -> None:
    def per_channel(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return None if parameter is None else parameter.view(impl.num_kv_heads, 1, -1)

    # The kernel adds the offsets, and requires both or neither.
    offsets = [layer.k_cache_offset, layer.v_cache_offset]
    if any(offset is not None for offset in offsets):
        offsets = [
            torch.zeros_like(layer.k_cache_scale) if offset is None else -offset
            for offset in offsets
        ]
    seq_lens = meta.lengths["actual_seq_lengths_kv"]
    num_decodes = len(query)
    attend = {
        "actual_seq_lengths_kv": seq_lens
        if len(seq_lens) == num_decodes
        else seq_lens[:num_decodes],
        "block_table": meta.block_table[:num_decodes],
        "block_size": key_cache.shape[1],
        "input_layout": "BNSD",
        "key_antiquant_scale": per_channel(layer.k_cache_scale),
        "key_antiquant_offset": per_channel(offsets[0]),
        "value_antiquant_scale": per_channel(layer.v_cache_scale),
        "value_antiquant_offset": per_channel(offsets[1]),
        **impl._head_args(),
    }
    tensors = query.contiguous().unsqueeze(2), key_cache.flatten(2), value_cache.flatten(2)
    if extension.is_captured():
        attend["workspace"] = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
            *tensors, **longest_lengths(attend)
        )
    with extension.graph_task():
        torch_npu.npu_fused_infer_attention_score.out(
            *tensors, **attend, out=[output.unsqueeze(2), meta.softmax_lse]
        )
