"""All2all manager of vLLM's expert parallel group: dispatch and combine of MoE tokens, with a backend selected per step.

*allgather*: every rank gets all tokens, and outputs are reduce-scattered (vLLM's ``AgRsAll2AllManager``). *alltoall*: each copy
of a token is sent to the rank of its expert and back; the host needs the message sizes. *mc2*: the same in CANN's operators
``npu_moe_distribute_dispatch_v2`` and ``npu_moe_distribute_combine_v2``, without synchronization with the host.
"""

import torch
import torch.distributed as dist
from ascend_platform import extension
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.forward_context import get_forward_context

from ascend_communicator.moe import Experts, alltoall, mc2
from ascend_communicator.moe.select import select_backend


class HCCLAll2AllManager(AgRsAll2AllManager):
    """vLLM's all2all manager with the backends allgather, alltoall and mc2."""

    def __init__(self, cpu_group: dist.ProcessGroup, device_group: dist.ProcessGroup) -> None:
        super().__init__(cpu_group)
        self.device_group = device_group
        self.requested = str(extension.config("communicator").get("all2all", "auto"))
        self.chip = extension.chip()
        self.used: set[str] = set()  # backends of the steps so far

    def apply_experts(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, experts: Experts
    ) -> torch.Tensor | None:
        """Compute the weighted sum of expert outputs for this rank's tokens, with the experts of all ranks.

        Args:
            x: ``[tokens, hidden]``.
            topk_weights, topk_ids: float and int32 ``[tokens, k]``.
            num_experts: experts of all ranks, which are divided among the ranks in order.
            experts: applies this rank's experts to rows sorted by expert: rows ``[rows, hidden]`` and rows per expert, int64
                ``[experts]``.

        Returns:
            ``[tokens, hidden]``, or None for the backend allgather, which the caller runs as ``dispatch`` and ``combine``.
        """
        metadata = get_forward_context().dp_metadata
        sizes = (metadata.get_chunk_sizes_across_dp_rank() if metadata else None) or []
        if len(sizes) != self.world_size:
            return None  # tensor-parallel ranks have the same tokens, which only allgather keeps together
        top_k = topk_ids.shape[1]
        backend = select_backend(self.requested, self.chip, sizes, num_experts, top_k, x.shape[1], x.dtype)
        if backend == "alltoall" and torch.npu.is_current_stream_capturing():
            backend = "allgather"  # the host cannot know the message sizes at a replay
        if backend not in self.used:
            self.used.add(backend)
            extension.logger.info("MoE all2all backend: %s (requested %s, up to %d tokens)", backend, self.requested, max(sizes))
        arguments = self.device_group, x, topk_weights, topk_ids, num_experts, experts
        if backend == "mc2":
            return mc2.dispatch_and_combine(self.chip, *arguments, max(sizes))
        return alltoall.dispatch_and_combine(*arguments) if backend == "alltoall" else None
