"""Dispatch and combine by ``npu_moe_distribute_dispatch_v2`` and ``npu_moe_distribute_combine_v2``, and their limits."""

from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from ascend_platform import extension

from ascend_communicator.moe import Experts

MC2_CHOICES, MC2_EXPERTS = 16, 1024


def obstacle_to_mc2(chip: extension.Chip, ranks: int, experts: int, choices: int, hidden: int, dtype: torch.dtype) -> str:
    """Why mc2 cannot serve a model here, whatever the number of tokens; "" if it can."""
    limits = chip.family.mc2
    if limits is None:
        return f"{chip.name} does not have it"
    if ranks not in limits.ranks:
        return f"{chip.name} does not take {ranks} ranks"
    if experts % ranks or experts > MC2_EXPERTS:
        return f"{experts} experts are more than {MC2_EXPERTS} or do not divide into {ranks} ranks"
    if choices > MC2_CHOICES:
        return f"{choices} experts for each token are more than {MC2_CHOICES}"
    if hidden not in limits.hidden:
        step = f" in steps of {limits.hidden.step}" if limits.hidden.step > 1 else ""
        return f"{hidden} elements of a token are not {limits.hidden.start} to {limits.hidden.stop - 1}{step}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{str(dtype).removeprefix('torch.')} is not float16 or bfloat16"
    return ""


def dispatch_and_combine(
    group: dist.ProcessGroup,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    experts: Experts,
    most: int,
) -> torch.Tensor:
    """Apply the experts of all ranks to this rank's tokens ``[tokens, hidden]``; see ``ExpertManager.apply_experts``.

    Args:
        most: tokens of the rank that has the most.
    """
    common: dict[str, Any] = {
        "group_ep": group._get_backend(x.device).get_hccl_comm_name(group.rank()),
        "ep_world_size": group.size(),
        "ep_rank_id": group.rank(),
        "moe_expert_num": num_experts,
        "global_bs": most * group.size(),
    }
    rows, _, origins, counts, received, *_ = torch_npu.npu_moe_distribute_dispatch_v2(
        x=x, expert_ids=topk_ids, expert_token_nums_type=1, **common
    )
    return torch_npu.npu_moe_distribute_combine_v2(
        expand_x=experts(rows, counts),
        expert_ids=topk_ids,
        assist_info_for_combine=origins,
        ep_send_counts=received,
        expert_scales=topk_weights.float(),
        **common,
    )
