"""How tokens reach their experts on other NPUs and come back: three ways, and the rule that chooses one for each step.

*allgather*: every rank has all tokens, and sums are reduced and scattered (vLLM's ``AgRsAll2AllManager``). *alltoall*: each
choice of a token travels to the rank of its expert and back, in messages whose sizes the host has to know. *mc2*: the same in
CANN's operators ``npu_moe_distribute_dispatch_v2`` and ``npu_moe_distribute_combine_v2``, for which the host does not wait.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from ascend_platform import extension
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.forward_context import get_forward_context

from ascend_communicator import WAYS


@dataclass(frozen=True)
class Limits:
    """What mc2 takes on a chip by the documentation of its operators: ranks, tokens of a rank at most, elements of a token."""

    ranks: frozenset[int]
    tokens: int
    hidden: range


MC2 = {
    "Ascend910B": Limits(frozenset({*range(2, 9), 16, 32, 64, 128, 256}), 256, range(32, 7168 + 1, 32)),
    "Ascend910_93": Limits(frozenset(range(2, 769)), 512, range(1024, 8192 + 1)),
}
"""By the beginning of the chip's name; alltoall serves the same chips."""

MC2_CHOICES, MC2_EXPERTS = 16, 1024

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def limits_of(chip: str) -> Limits | None:
    return next((limits for name, limits in MC2.items() if chip.startswith(name)), None)


def obstacle_to_mc2(chip: str, ranks: int, experts: int, choices: int, hidden: int, dtype: torch.dtype) -> str:
    """Why mc2 cannot serve a model here, whatever the number of tokens; "" if it can."""
    limits = limits_of(chip)
    if limits is None:
        return f"{chip} does not have it"
    if ranks not in limits.ranks:
        return f"{chip} does not take {ranks} ranks"
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


def way(asked: str, chip: str, sizes: list[int], experts: int, choices: int, hidden: int, dtype: torch.dtype) -> str:
    """The way for a step, the same on all ranks since all that it looks at is.

    mc2 where it serves: it is the one way in which the host does not wait and only chosen copies travel. Else alltoall where less
    travels than with allgather: ``choices`` copies of a token each way, against one to each of the ranks. Else allgather.

    Args:
        asked: ``auto``, or the way to take; ``mc2`` for steps of more tokens than it takes is ``alltoall``.
        chip: name of the NPU.
        sizes: tokens of each rank.
        experts, choices: experts of all ranks, and how many each token chooses.
        hidden, dtype: of a token.

    Raises:
        ValueError: mc2 was asked for and cannot serve this model here.
    """
    ranks = len(sizes)
    obstacle = obstacle_to_mc2(chip, ranks, experts, choices, hidden, dtype)
    if asked == "mc2" and obstacle:
        raise ValueError(
            f"ascend.communicator.all2all is mc2, which cannot serve: {obstacle}; set auto or {' or '.join(WAYS[:2])}"
        )
    limits = limits_of(chip)
    if asked in ("auto", "mc2") and limits and not obstacle and min(sizes) >= 1 and max(sizes) <= limits.tokens:
        return "mc2"
    if asked == "auto":
        exchangeable = limits is not None and experts % ranks == 0
        return "alltoall" if exchangeable and choices < ranks else "allgather"
    return "alltoall" if asked == "mc2" else asked


class ExpertManager(AgRsAll2AllManager):
    """vLLM's manager of experts' tokens for its group of experts, in the three ways of this module."""

    def __init__(self, cpu_group: dist.ProcessGroup, device_group: dist.ProcessGroup) -> None:
        super().__init__(cpu_group)
        self.device_group = device_group
        self.asked = str(extension.config("communicator").get("all2all", "auto"))
        self.chip = torch.npu.get_device_name()
        self.taken: set[str] = set()  # the ways that steps took so far

    def apply_experts(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, experts: Experts
    ) -> torch.Tensor | None:
        """What the chosen experts of all ranks make of this rank's tokens, weighed and added.

        Args:
            x: ``[tokens, hidden]``.
            topk_weights, topk_ids: float and int32 ``[tokens, k]``.
            num_experts: of all ranks; each has as many, in the order of ranks.
            experts: applies this rank's experts to rows that are in their order: rows ``[rows, hidden]`` and how many each
                has, int64 ``[experts]``.

        Returns:
            ``[tokens, hidden]``, or None where the way is allgather, whose parts are ``dispatch`` and ``combine``.
        """
        metadata = get_forward_context().dp_metadata
        sizes = (metadata.get_chunk_sizes_across_dp_rank() if metadata else None) or []
        if len(sizes) != self.world_size:
            return None  # tensor-parallel ranks have the same tokens: only allgather leaves them together
        taken = way(self.asked, self.chip, sizes, num_experts, topk_ids.shape[1], x.shape[1], x.dtype)
        if taken == "alltoall" and torch.npu.is_current_stream_capturing():
            taken = "allgather"  # the host would have to know the sizes of messages
        if taken not in self.taken:
            self.taken.add(taken)
            extension.logger.info("experts' tokens travel by %s (%s asked for, %d at most)", taken, self.asked, max(sizes))
        if taken == "mc2":
            return self._mc2(x, topk_weights, topk_ids, num_experts, experts, max(sizes))
        if taken == "alltoall":
            return self._alltoall(x, topk_weights, topk_ids, num_experts, experts)
        return None

    def _mc2(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        experts: Experts,
        most: int,
    ) -> torch.Tensor:
        group: dict[str, Any] = {
            "group_ep": self.device_group._get_backend(x.device).get_hccl_comm_name(self.rank),
            "ep_world_size": self.world_size,
            "ep_rank_id": self.rank,
            "moe_expert_num": num_experts,
            "global_bs": most * self.world_size,
        }
        rows, _, origins, counts, received, *_ = torch_npu.npu_moe_distribute_dispatch_v2(
            x=x, expert_ids=topk_ids, expert_token_nums_type=1, **group
        )
        return torch_npu.npu_moe_distribute_combine_v2(
            expand_x=experts(rows, counts),
            expert_ids=topk_ids,
            assist_info_for_combine=origins,
            ep_send_counts=received,
            expert_scales=topk_weights.float(),
            **group,
        )

    def _alltoall(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, experts: Experts
    ) -> torch.Tensor:
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
        dist.all_to_all_single(here, counts, group=self.device_group)
        by_rank = torch.stack((counts, here)).view(2, self.world_size, -1)
        sent, received = by_rank.sum(-1).tolist()  # the host waits: HCCL wants the sizes from it
        arrived = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(arrived, rows, received, sent, group=self.device_group)
        made = self._by_expert(arrived, by_rank[1], experts) if len(arrived) else arrived
        back = torch.empty_like(rows)
        dist.all_to_all_single(back, made, sent, received, group=self.device_group)
        weights = topk_weights.to(back.dtype)
        return torch_npu.npu_moe_finalize_routing(back, None, None, None, weights, places, None, drop_pad_mode=2)

    @staticmethod
    def _by_expert(arrived: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Experts applied to rows that are in the order of ranks, and within a rank of experts; counts ``[ranks, experts]``."""
        halves = torch.float16 if arrived.dtype == torch.float32 else arrived.dtype  # it takes no float32, and only moves
        grouped, _, positions, totals = torch_npu.npu_moe_re_routing(arrived.view(halves), counts.contiguous(), idx_type=1)
        return experts(grouped.view(arrived.dtype), totals.long()).index_select(0, positions)
