"""Decode context parallelism: a request's keys and values are spread over the ranks of vLLM's group for it, token by token.

Each rank attends from all query heads of the group to the tokens that it has of earlier steps, and from its own heads to the
step's new tokens, which all ranks have. The parts travel to the rank of their head, where npu_attention_update weighs them by
their log-sums of exponentials (``torch_npu/_op_plugin_docs.py``). ``vllm/v1/attention/backends/flash_attn.py`` does the same
with kernels that do not exist here.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from vllm.distributed import get_dcp_group
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from ascend_attention.metadata import FusedAttentionMetadata, Spread


def spread(query_ends: list[int], kv_lens: list[int], slot_mapping: torch.Tensor, interleave: int) -> Spread:
    """Lay out one step on the host, without waiting for the device.

    Args:
        query_ends: where each request's tokens end among the step's.
        kv_lens: tokens of each request once this step's are written, on all ranks together.
        slot_mapping: int64 ``[tokens]``, of this rank; other ranks' tokens have none.
        interleave: so many tokens stand on a rank before the next one has its turn (``cp_kv_cache_interleave_size``).
    """
    group = get_dcp_group()
    ends = torch.tensor(query_ends)
    lengths = ends.diff(prepend=ends.new_zeros(1))
    before = torch.tensor(kv_lens) - lengths
    positions = torch.arange(query_ends[-1]) + (before + lengths - ends).repeat_interleave(lengths)
    mine = (positions // interleave % group.world_size == group.rank_in_group).nonzero().squeeze(1)
    mine = mine.pin_memory().to(slot_mapping.device, non_blocking=True)
    cached = get_dcp_local_seq_lens(before, group.world_size, group.rank_in_group, interleave).tolist() if before.any() else None
    return Spread(cached, mine, slot_mapping[mine])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    meta: FusedAttentionMetadata,
    heads: dict[str, Any],
    output: torch.Tensor,
) -> None:
    """Attention of a step's tokens to each other and to what the group's ranks have of earlier ones.

    Args:
        query: ``[tokens, heads, head_size]`` of this rank; output has its shape and is written.
        key, value: ``[tokens, kv_heads, head_size]``.
        cache: keys and values, each ``[blocks, block_size, kv_heads, head_size]``.
        meta: with ``spread``.
        heads: of this rank, the kernel's ``num_heads``, ``num_key_value_heads`` and ``scale``.
    """
    assert meta.spread is not None
    ends = meta.lengths["actual_seq_lengths"]
    common = heads | {"input_layout": "TND", "actual_seq_lengths": ends, "softmax_lse_flag": True}
    fused = torch_npu.npu_fused_infer_attention_score
    own = {"atten_mask": meta.mask, "sparse_mode": 3, "actual_seq_lengths_kv": ends}
    out, log_sum = fused(query.contiguous(), key.contiguous(), value.contiguous(), **common | own)
    if meta.spread.cached is not None:
        group = get_dcp_group()
        everyone = group.all_gather(query.contiguous(), dim=1)
        paged = {"block_table": meta.block_table, "block_size": cache[0].shape[1], "actual_seq_lengths_kv": meta.spread.cached}
        paged["num_heads"] = heads["num_heads"] * group.world_size
        parts, log_sums = fused(everyone, *(pages.flatten(2) for pages in cache), **common | paged)
        log_sums.masked_fill_(log_sums == torch.inf, -torch.inf)  # where a request has nothing here
        parts, log_sums = (_to_the_heads_rank(each, group) for each in (parts, log_sums))
        out, _ = torch_npu.npu_attention_update(
            [*log_sums.flatten(1), log_sum.flatten()], [*parts.flatten(1, 2), out.flatten(0, 1)], 0
        )
    output.copy_(out.view_as(output))


def _to_the_heads_rank(part: torch.Tensor, group: Any) -> torch.Tensor:
    """From ``[tokens, heads of the group, width]`` to ``[ranks, tokens, heads of this rank, width]``, a part of each rank."""
    sent = part.unflatten(1, (group.world_size, -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.device_group)
    return received
