# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Decode context parallelism: the tokens of a request are distributed over the KV caches of vLLM's
DCP ranks.

Each rank computes attention from the query heads of all ranks to the context in its own KV cache,
and from its own heads to the step's new tokens, whose keys and values are on all ranks. An
all-to-all sends the partial outputs to the rank of their head, where npu_attention_update merges
them by their softmax_lse (``torch_npu/_op_plugin_docs.py``).
``vllm/v1/attention/backends/flash_attn.py`` is the reference.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from vllm.distributed import get_dcp_group
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from ascend_attention import unpaged
from ascend_attention.context import chunk_of, cut_context, merge
from ascend_attention.metadata import DCPMetadata, FusedAttentionMetadata


def build_metadata(
    cu_query_lens: list[int],
    seq_lens: list[int],
    slot_mapping: torch.Tensor,
    interleave: int,
    block_table: torch.Tensor,
    by_chunks: bool,
) -> DCPMetadata:
    """Build this rank's share of a step on the host, without synchronizing with the device.

    Args:
        cu_query_lens: cumulative query length of each request.
        seq_lens: sequence length of each request over all ranks, after this step's tokens are
            written.
        slot_mapping: int64 ``[tokens]`` of this rank; only the slots of its own tokens are valid.
        interleave: consecutive tokens per rank (``cp_kv_cache_interleave_size``).
        block_table: int32 ``[requests, blocks]``.
        by_chunks: whether the kernel takes pages only for requests with one token (unpaged.py).
    """
    group = get_dcp_group()
    ends = torch.tensor(cu_query_lens)
    query_lens = ends.diff(prepend=ends.new_zeros(1))
    context_lens = torch.tensor(seq_lens) - query_lens
    positions = torch.arange(cu_query_lens[-1]) + (
        context_lens + query_lens - ends
    ).repeat_interleave(query_lens)
    local = (positions // interleave % group.world_size == group.rank_in_group).nonzero().squeeze(1)
    local = local.pin_memory().to(slot_mapping.device, non_blocking=True)
    if not context_lens.any():
        return DCPMetadata(None, local, slot_mapping[local])
    cached_lens = get_dcp_local_seq_lens(
        context_lens, group.world_size, group.rank_in_group, interleave
    ).tolist()
    if not by_chunks:
        return DCPMetadata(cached_lens, local, slot_mapping[local])
    counts = query_lens.tolist()
    first = next((place for place, count in enumerate(counts) if count > 1), len(counts))
    others = [0] * first + cached_lens[first:]
    pieces = cut_context(others, unpaged.capacity(cu_query_lens[-1], None))
    chunks = (chunk_of(each, cu_query_lens, block_table) for each in pieces)
    return DCPMetadata(cached_lens, local, slot_mapping[local], first, tuple(chunks))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    meta: FusedAttentionMetadata,
    head_args: dict[str, Any],
    output: torch.Tensor,
) -> None:
    """Compute attention of a step's tokens to each other and to the context in the KV caches of all
    DCP ranks.

    Args:
        query: ``[tokens, heads, head_size]`` of this rank; output has the same shape and is
            written.
        key: ``[tokens, kv_heads, head_size]``.
        value: ``[tokens, kv_heads, head_size]``.
        kv_cache: keys and values, each ``[blocks, block_size, kv_heads, head_size]``.
        meta: metadata with ``dcp``.
        head_args: the kernel's ``num_heads``, ``num_key_value_heads`` and ``scale`` for this rank.
    """
    assert meta.dcp is not None
    cu_query_lens = meta.lengths["actual_seq_lengths"]
    common = head_args | {
        "input_layout": "TND",
        "actual_seq_lengths": cu_query_lens,
        "softmax_lse_flag": True,
    }
    fused = torch_npu.npu_fused_infer_attention_score
    causal = {"atten_mask": meta.mask, "sparse_mode": 3, "actual_seq_lengths_kv": cu_query_lens}
    out, softmax_lse = fused(
        query.contiguous(), key.contiguous(), value.contiguous(), **common | causal
    )
    if (cached_lens := meta.dcp.cached_lens) is not None:
        group = get_dcp_group()
        all_heads = group.all_gather(query.contiguous(), dim=1)
        heads = head_args | {"num_heads": head_args["num_heads"] * group.world_size}
        pages = [cache.flatten(2) for cache in kv_cache]

        def paged(requests: slice, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            options = {
                "block_table": meta.block_table[requests],
                "block_size": kv_cache[0].shape[1],
                "actual_seq_lengths": list(cu_query_lens)[requests],
                "actual_seq_lengths_kv": cached_lens[requests],
            }
            return fused(all_heads[rows], *pages, **common | heads | options)

        count = meta.dcp.num_paged
        if count is None or count == len(cached_lens):
            parts, lse_parts = paged(slice(None), slice(None))
        else:
            parts = torch.zeros_like(all_heads, dtype=torch.float32)
            lse_parts = parts.new_full((*parts.shape[:2], 1), -torch.inf)
            if count:
                rows = slice(cu_query_lens[count - 1])
                parts[rows], lse_parts[rows] = paged(slice(count), rows)
            parts, lse_parts = unpaged.with_context(
                fused,
                all_heads,
                unpaged.reader(*kv_cache),
                meta.dcp.chunks,
                (parts, lse_parts),
                0,
                heads,
            )
        # requests without context on this rank
        lse_parts.masked_fill_(lse_parts == torch.inf, -torch.inf)
        parts, lse_parts = (exchange_heads(each, group) for each in (parts, lse_parts))
        out, _ = merge(
            [softmax_lse.flatten(), *lse_parts.flatten(1)],
            [out.flatten(0, 1), *parts.flatten(1, 2)],
        )
    output.copy_(out.view_as(output))


def exchange_heads(part: torch.Tensor, group: Any) -> torch.Tensor:
    """All-to-all from ``[tokens, heads of all ranks, width]`` to ``[ranks, tokens, heads of this
    rank, width]``."""
    sent = part.unflatten(1, (group.world_size, -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.device_group)
    return received
