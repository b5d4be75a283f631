# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""All2all manager of vLLM's expert parallel group: dispatch and combine of MoE tokens, with a
backend selected per step.

*allgather*: every rank gets all tokens, and outputs are reduce-scattered (vLLM's
``AgRsAll2AllManager``). *alltoall*: each copy of a token is sent to the rank of its expert and
back; the host needs the message sizes. *mc2*: the same in CANN's operators
``npu_moe_distribute_dispatch_v2`` and ``npu_moe_distribute_combine_v2``, without synchronization
with the host.
"""

import os

import torch
import torch.distributed as dist
from ascend_platform import extension
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.forward_context import get_forward_context

from ascend_communicator import options
from ascend_communicator.moe import MoEShape, alltoall, mc2
from ascend_communicator.moe.select import select_backend


class HCCLAll2AllManager(AgRsAll2AllManager):
    """vLLM's all2all manager with the backends allgather, alltoall and mc2."""

    def __init__(self, cpu_group: dist.ProcessGroup, device_group: dist.ProcessGroup) -> None:
        super().__init__(cpu_group)
        self.device_group = device_group
        self.requested = options().all2all
        self.chip = extension.chip()
        self.used: set[str] = set()  # backends of the steps so far
        self._limits: dict[MoEShape, mc2.Limit] = {}
        self._mc2_group: mc2.MC2Group | None = None
        self._hccl_config = options().hccl_config("mc2")
        mc2_of_chip = self.chip.family.mc2
        if "hccl_buffer_size" in self._hccl_config and mc2_of_chip and not mc2_of_chip.group_buffer:
            raise extension.RefusedError(
                f"ascend.communicator.groups.mc2.buffer_size has no effect on {self.chip.name},"
                " whose operators take the size from HCCL_BUFFSIZE; fix: set HCCL_BUFFSIZE instead"
            )
        config = get_current_vllm_config()
        decoded = config.scheduler_config.max_num_seqs * (1 + config.num_speculative_tokens)
        captured = config.compilation_config.max_cudagraph_capture_size or 0
        self._decode_tokens = max(decoded, captured)

    def dispatch_and_combine(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        experts: extension.Experts,
    ) -> torch.Tensor | None:
        """Compute the weighted sum of expert outputs for this rank's tokens, with the experts of
        all ranks.

        Args:
            x: ``[tokens, hidden]``.
            topk_weights: float ``[tokens, k]``.
            topk_ids: int32 ``[tokens, k]``.
            num_experts: experts of all ranks, which are divided among the ranks in order.
            experts: applies this rank's experts to rows sorted by expert.

        Returns:
            ``[tokens, hidden]``, or None for the backend allgather, which the caller runs as
            ``dispatch`` and ``combine``.
        """
        metadata = get_forward_context().dp_metadata
        sizes = (metadata.get_chunk_sizes_across_dp_rank() if metadata else None) or []
        if len(sizes) != self.world_size:
            # Tensor-parallel ranks have the same tokens, and only allgather keeps them together.
            return None
        shape = MoEShape(self.world_size, num_experts, topk_ids.shape[1], x.shape[1], x.dtype)
        backend, reason = select_backend(
            self.requested, self.chip, sizes, shape, self._limit(shape)
        )
        if backend == "alltoall" and torch.npu.is_current_stream_capturing():
            backend = "allgather"  # The host cannot know the message sizes at a replay.
        if backend not in self.used:
            self.used.add(backend)
            extension.logger.info(
                "MoE all2all backend: %s (requested %s, up to %d tokens%s)",
                *(backend, self.requested, max(sizes), f"; {reason}" if reason else ""),
            )
        if backend == "mc2":
            assert self._mc2_group is not None
            limits = mc2.algorithm(self.chip, shape, self.internode)
            return mc2.dispatch_and_combine(
                limits, self._mc2_group, x, topk_weights, topk_ids, num_experts, experts, max(sizes)
            )
        if backend == "alltoall":
            return alltoall.dispatch_and_combine(
                self.device_group, x, topk_weights, topk_ids, num_experts, experts
            )
        return None

    def _limit(self, shape: MoEShape) -> mc2.Limit:
        """Tokens that mc2 takes, the same on all ranks. Creates the group of mc2 at the first call
        with a shape it supports."""
        if self.requested not in ("auto", "mc2"):
            return mc2.Limit(0, "")
        family, is_chosen = self.chip.family, self.requested == "auto"
        if is_chosen and family.mc2 and not (family.mc2.within_machine or self.internode):
            return mc2.Limit(0, f"MC2 of {self.chip.name} leaves the machine")
        if shape not in self._limits:
            limit = mc2.token_limit(self.chip, shape, self.internode, self._buffer_mib(shape))
            # HCCL_BUFFSIZE may differ between machines
            agreed = torch.tensor(limit.tokens)
            dist.all_reduce(agreed, dist.ReduceOp.MIN, self.cpu_group)
            if agreed.item() < limit.tokens:
                limit = mc2.Limit(
                    int(agreed), f"mc2 takes up to {int(agreed)} tokens of a rank on another rank"
                )
            if limit.tokens and self._mc2_group is None:
                self._mc2_group = mc2.MC2Group(self.cpu_group, self._hccl_config)
            self._limits[shape] = limit
        return self._limits[shape]

    def _buffer_mib(self, shape: MoEShape) -> int:
        """MiB of the mc2 group's buffer: as set, or for the tokens of a decode step."""
        family = self.chip.family
        if family.mc2 is None or mc2.unsupported_reason(self.chip, shape, self.internode):
            return 0
        if not family.mc2.group_buffer:
            return buffer_mib_of_environment()
        if "hccl_buffer_size" not in self._hccl_config:
            limits = mc2.algorithm(self.chip, shape, self.internode)
            needed = mc2.buffer_mib(limits.comm_alg, shape, min(limits.tokens, self._decode_tokens))
            self._hccl_config["hccl_buffer_size"] = needed
        return self._hccl_config["hccl_buffer_size"]

    def destroy(self) -> None:
        if self._mc2_group is not None:
            self._mc2_group.destroy()
            self._mc2_group = None
            self._limits.clear()
        super().destroy()


HCCL_BUFFER_MIB = 200
"""HCCL_BUFFSIZE's default."""


def buffer_mib_of_environment() -> int:
    """HCCL_BUFFSIZE, in MiB.

    Raises:
        RefusedError: it is not a number.
    """
    value = os.environ.get("HCCL_BUFFSIZE") or str(HCCL_BUFFER_MIB)
    if not value.isdecimal() or int(value) < 1:
        raise extension.RefusedError(
            f"HCCL_BUFFSIZE is {value!r}; supported: an integer from 1 (MiB); fix: set such a number,"
            f" or unset it (its default is {HCCL_BUFFER_MIB})"
        )
    return int(value)
