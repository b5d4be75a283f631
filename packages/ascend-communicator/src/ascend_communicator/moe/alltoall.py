"""Dispatch and combine by all-to-all: each copy of a token is sent to the rank of its expert and back."""

import torch
import torch.distributed as dist
import torch_npu

from ascend_communicator.moe import Experts


def dispatch_and_combine(
    group: dist.ProcessGroup,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    experts: Experts,
) -> torch.Tensor:
    """Apply the experts of all ranks to this rank's tokens ``[tokens, hidden]``; see ``ExpertManager.apply_experts``."""
    # copies in the order of experts, hence of the ranks that have them
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x,
        topk_ids,
        active_num=topk_ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
        quant_mode=-1,
    )
    here = torch.empty_like(counts)
    dist.all_to_all_single(here, counts, group=group)
    by_rank = torch.stack((counts, here)).view(2, group.size(), -1)
    sent, received = by_rank.sum(-1).tolist()  # the host waits: HCCL wants the sizes from it
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(arrived, rows, received, sent, group=group)
    made = _by_expert(arrived, by_rank[1], experts) if len(arrived) else arrived
    back = torch.empty_like(rows)
    dist.all_to_all_single(back, made, sent, received, group=group)
    weights = topk_weights.to(back.dtype)
    return torch_npu.npu_moe_finalize_routing(back, None, None, None, weights, places, None, drop_pad_mode=2)


def _by_expert(arrived: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Experts applied to rows that are in the order of ranks, and within a rank of experts; counts ``[ranks, experts]``."""
    halves = torch.float16 if arrived.dtype == torch.float32 else arrived.dtype  # it takes no float32, and only moves
    grouped, _, positions, totals = torch_npu.npu_moe_re_routing(arrived.view(halves), counts.contiguous(), idx_type=1)
    return experts(grouped.view(arrived.dtype), totals.long()).index_select(0, positions)
