"""How tokens reach their experts on other NPUs and come back: three ways, and the rule that chooses one for each step.

*allgather*: every rank has all tokens, and sums are reduced and scattered (vLLM's ``AgRsAll2AllManager``). *alltoall*: each
choice of a token travels to the rank of its expert and back, in messages whose sizes the host has to know. *mc2*: the same in
CANN's operators ``npu_moe_distribute_dispatch_v2`` and ``npu_moe_distribute_combine_v2``, for which the host does not wait.
"""

import torch
import torch.distributed as dist
from ascend_platform import extension
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.forward_context import get_forward_context

from ascend_communicator.moe import Experts, alltoall, mc2
from ascend_communicator.moe.select import way


class ExpertManager(AgRsAll2AllManager):
    """vLLM's manager of experts' tokens for its group of experts, in the three ways of this module."""

    def __init__(self, cpu_group: dist.ProcessGroup, device_group: dist.ProcessGroup) -> None:
        super().__init__(cpu_group)
        self.device_group = device_group
        self.asked = str(extension.config("communicator").get("all2all", "auto"))
        self.chip = extension.chip()
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
        exchange = self.device_group, x, topk_weights, topk_ids, num_experts, experts
        if taken == "mc2":
            return mc2.dispatch_and_combine(*exchange, max(sizes))
        return alltoall.dispatch_and_combine(*exchange) if taken == "alltoall" else None
