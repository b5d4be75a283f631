# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Dispatch and combine by ``npu_moe_distribute_dispatch_v2`` and ``npu_moe_distribute_combine_v2``,
and their limits.

Limits and buffer sizes are those of op-plugin's documentation of the operators.
"""

import bisect
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch_npu
from ascend_platform import extension

from ascend_communicator.moe import MoEShape

MAX_TOP_K, MAX_EXPERTS = 16, 1024
MIB = 1 << 20
INT8 = 2
"""``quant_mode`` of dispatch: int8, dynamically by row."""


class Limit(NamedTuple):
    """The most tokens of a rank that mc2 takes, and what the limit is due to."""

    tokens: int
    reason: str


def algorithm(chip: extension.Chip, shape: MoEShape, internode: bool) -> Any:
    """The MC2 algorithm for a group, of one machine or of several; None if the chip has no MC2."""
    mc2 = chip.family.mc2
    if mc2 is None:
        return None
    other = mc2.internode if internode else None
    return (
        other
        if other and shape.ranks in other.ranks and shape.hidden in other.hidden
        else mc2.default
    )


def unsupported_reason(chip: extension.Chip, shape: MoEShape, internode: bool) -> str:
    """Reason why mc2 does not support a model on this chip, for any number of tokens; "" if it
    does."""
    limits = algorithm(chip, shape, internode)
    if limits is None:
        return f"{chip.name} lacks the operators"
    if shape.ranks not in limits.ranks:
        return f"{shape.ranks} ranks are not supported on {chip.name}"
    if shape.experts % shape.ranks or shape.experts > MAX_EXPERTS:
        return (
            f"{shape.experts} experts exceed {MAX_EXPERTS} or are not divisible by {shape.ranks}"
            " ranks"
        )
    if shape.top_k > MAX_TOP_K:
        return f"{shape.top_k} experts per token exceed {MAX_TOP_K}"
    if shape.hidden not in limits.hidden:
        step = f" in steps of {limits.hidden.step}" if limits.hidden.step > 1 else ""
        return (
            f"hidden size {shape.hidden} is not within {limits.hidden.start} to"
            f" {limits.hidden.stop - 1}{step}"
        )
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"{str(shape.dtype).removeprefix('torch.')} is not float16 or bfloat16"
    return ""


def buffer_mib(comm_alg: str, shape: MoEShape, tokens: int) -> int:
    """MiB of HCCL buffer that an algorithm needs for this number of tokens per rank."""

    def align(size: int, step: int) -> int:
        return -(-size // step) * step

    ranks, top_k, row = shape.ranks, shape.top_k, 2 * shape.hidden
    local = shape.experts // ranks
    if comm_alg == "fullmesh":
        size = 2 * (tokens * ranks * min(local, top_k) * row + 2 * MIB)
    elif comm_alg == "hierarchy":
        size = (shape.experts + ranks // 4) * align(
            tokens * (row + 16 * align(top_k, 8)), 512
        ) + 8 * MIB
    else:
        size = (
            2
            * tokens
            * (local * ranks * align(align(row, 32) + 64, 512) + (top_k + 1) * align(row, 512))
        )
    return align(size, MIB) // MIB


def token_limit(chip: extension.Chip, shape: MoEShape, internode: bool, mib: int) -> Limit:
    """The most tokens of a rank with an HCCL buffer of ``mib`` MiB; 0 if mc2 does not support the
    model."""
    if reason := unsupported_reason(chip, shape, internode):
        return Limit(0, reason)
    limits = algorithm(chip, shape, internode)
    counts = range(1, limits.tokens + 1)
    tokens = bisect.bisect_right(
        counts, mib, key=lambda count: buffer_mib(limits.comm_alg, shape, count)
    )
    if tokens == limits.tokens:
        return Limit(tokens, f"mc2 takes up to {tokens} tokens of a rank")
    needed = buffer_mib(limits.comm_alg, shape, limits.tokens)
    of_group = chip.family.mc2 is not None and chip.family.mc2.group_buffer
    setting = "ascend.communicator.groups.mc2.buffer_size" if of_group else "HCCL_BUFFSIZE"
    return Limit(
        tokens,
        f"mc2 takes up to {tokens} tokens of a rank with an HCCL buffer of {mib} MiB, and"
        f" {limits.tokens} with {needed}: set {setting}",
    )


class MC2Group:
    """An HCCL group only for dispatch and combine: their documentation allows no other operator on
    their communicator.

    All ranks must create it together. The communicator is created at once, so that its buffers are
    in vLLM's memory profile.

    Args:
        cpu_group: a gloo group of the same ranks.
        hccl_config: options of the communicator, by torch_npu's names.
    """

    def __init__(self, cpu_group: dist.ProcessGroup, hccl_config: dict[str, int]) -> None:
        ranks = dist.get_process_group_ranks(cpu_group)
        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = hccl_config
        self.group = dist.new_group(
            ranks,
            backend="hccl",
            pg_options=options,
            use_local_synchronization=True,
            group_desc="mc2",
        )
        self.rank, self.size = self.group.rank(), self.group.size()
        backend = self.group._get_backend(torch.device("npu"))
        # A local group is named after its ranks, so an earlier one of the same ranks may have left
        # its root info in the store.
        if self.rank == 0:
            backend._delete_tcpstore_key()
        dist.barrier(cpu_group)
        self.name = backend.get_hccl_comm_name(self.rank)

    def destroy(self) -> None:
        dist.destroy_process_group(self.group)


def dispatch_and_combine(
    limits: Any,
    group: MC2Group,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    experts: extension.Experts,
    max_tokens: int,
) -> torch.Tensor:
    """Apply the experts of all ranks to this rank's tokens ``[tokens, hidden]``; see
    ``HCCLAll2AllManager.dispatch_and_combine``.

    Args:
        limits: of :func:`algorithm`.
        max_tokens: the largest number of tokens of a rank.
    """
    scales = topk_weights.float()
    common: dict[str, Any] = {
        "group_ep": group.name,
        "ep_world_size": group.size,
        "ep_rank_id": group.rank,
        "moe_expert_num": num_experts,
        "global_bs": max_tokens * group.size,
        "comm_alg": limits.comm_alg,
    }
    rows, row_scales, assist_info, counts, recv_counts, _, expand_scales = (
        torch_npu.npu_moe_distribute_dispatch_v2(
            x=x,
            expert_ids=topk_ids,
            expert_scales=scales if limits.expert_scales else None,
            quant_mode=INT8 if experts.takes_int8 else 0,
            expert_token_nums_type=1,
            **common,
        )
    )
    return torch_npu.npu_moe_distribute_combine_v2(
        expand_x=experts(rows, counts, row_scales if experts.takes_int8 else None),
        expert_ids=topk_ids,
        assist_info_for_combine=assist_info,
        ep_send_counts=recv_counts,
        expert_scales=scales,
        expand_scales=expand_scales if limits.expert_scales else None,
        **common,
    )
