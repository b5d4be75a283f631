"""Dispatch and combine by ``npu_moe_distribute_dispatch_v2`` and ``npu_moe_distribute_combine_v2``, and their limits."""

from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from ascend_platform import extension

from ascend_communicator.moe import Experts

MAX_TOP_K, MAX_EXPERTS = 16, 1024


def unsupported_reason(chip: extension.Chip, ranks: int, experts: int, top_k: int, hidden: int, dtype: torch.dtype) -> str:
    """Reason why mc2 does not support a model on this chip, for any number of tokens; "" if it does."""
    limits = chip.family.mc2
    if limits is None:
        return f"{chip.name} lacks the operators"
    if ranks not in limits.ranks:
        return f"{ranks} ranks are not supported on {chip.name}"
    if experts % ranks or experts > MAX_EXPERTS:
        return f"{experts} experts exceed {MAX_EXPERTS} or are not divisible by {ranks} ranks"
    if top_k > MAX_TOP_K:
        return f"{top_k} experts per token exceed {MAX_TOP_K}"
    if hidden not in limits.hidden:
        step = f" in steps of {limits.hidden.step}" if limits.hidden.step > 1 else ""
        return f"hidden size {hidden} is not within {limits.hidden.start} to {limits.hidden.stop - 1}{step}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{str(dtype).removeprefix('torch.')} is not float16 or bfloat16"
    return ""


def dispatch_and_combine(
    chip: extension.Chip,
    group: dist.ProcessGroup,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    experts: Experts,
    max_tokens: int,
) -> torch.Tensor:
    """Apply the experts of all ranks to this rank's tokens ``[tokens, hidden]``; see ``HCCLAll2AllManager.apply_experts``.

    Args:
        max_tokens: the largest number of tokens of a rank.
    """
    limits, scales = chip.family.mc2, topk_weights.float()
    takes_expand_scales = limits is not None and limits.expand_scales
    common: dict[str, Any] = {
        "group_ep": group._get_backend(x.device).get_hccl_comm_name(group.rank()),
        "ep_world_size": group.size(),
        "ep_rank_id": group.rank(),
        "moe_expert_num": num_experts,
        "global_bs": max_tokens * group.size(),
    }
    rows, _, assist_info, counts, recv_counts, _, expand_scales = torch_npu.npu_moe_distribute_dispatch_v2(
        x=x,
        expert_ids=topk_ids,
        expert_scales=scales if takes_expand_scales else None,
        expert_token_nums_type=1,
        **common,
    )
    return torch_npu.npu_moe_distribute_combine_v2(
        expand_x=experts(rows, counts),
        expert_ids=topk_ids,
        assist_info_for_combine=assist_info,
        ep_send_counts=recv_counts,
        expert_scales=scales,
        expand_scales=expand_scales if takes_expand_scales else None,
        **common,
    )
