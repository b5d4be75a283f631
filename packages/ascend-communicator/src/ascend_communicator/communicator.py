# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's device communicator over HCCL, through torch_npu's process group ``hccl``.

The methods inherited from ``DeviceCommunicatorBase`` are one HCCL call each (``all_reduce`` works
in place, as its caller in ``vllm/distributed/parallel_state.py`` allows). This class adds the
methods that the base class lacks, and MoE dispatch and combine, which return their input unchanged
in the base class, without an error.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from ascend_platform import extension
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.base_device_communicator import (
    All2AllManagerBase,
    DeviceCommunicatorBase,
)

from ascend_communicator import EXPANSION_MODES, HCCL_CONFIG, options

INHERITED = {
    "all_reduce": "HcclAllReduce in place",
    "all_gather": "HcclAllGather, and a copy if the dimension is not the first",
    "reduce_scatter": "HcclReduceScatter, with copies if the dimension is not the first",
    "gather": "torch_npu's, on HcclAllGather: HCCL has no gather",
    "send": "HcclSend",
    "recv": "HcclRecv",
    "broadcast": "HcclBroadcast",
    "get_symmetric_memory_buffer": "None: torch_npu has no symmetric memory for HCCL's collectives",
    "suspend": "none: HCCL does not free its buffers during a group's lifetime",
    "resume": "nothing, as suspend",
    "checkpoint_prepare": "nothing, as suspend",
    "checkpoint_restore": "nothing, as suspend",
}
"""Inherited methods and the HCCL calls below them. A test compares this list with the base class.
"""

AIV = {HCCL_CONFIG["expansion_mode"]: EXPANSION_MODES["AIV"]}


def is_lone(group: str) -> bool:
    """Whether a group is tensor parallelism on one machine, and the NPUs have no other groups."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return False
    parallel = config.parallel_config
    is_alone = parallel.world_size_across_dp == parallel.tensor_parallel_size > 1
    is_alone = is_alone and parallel.decode_context_parallel_size == 1
    is_local = parallel.distributed_executor_backend == "mp" and parallel.nnodes == 1
    return group == "tp" and is_alone and is_local and not parallel.enable_expert_parallel


def expansion_mode(group: str) -> dict[str, int]:
    """Where HCCL schedules a group's collectives, as torch_npu's ``hccl_config``: on the vector
    cores for a lone group.

    CANN does not support it for several groups of an NPU at a time. ``HCCL_OP_EXPANSION_MODE``
    decides for all groups where it is set.
    """
    is_served = is_lone(group) and extension.chip().family.vector_collectives
    return AIV if is_served and "HCCL_OP_EXPANSION_MODE" not in os.environ else {}


def warn_of_vector_cores(group: str, hccl_config: Mapping[str, int]) -> None:
    """Warn of a group's option ``expansion_mode`` that is AIV beside other groups."""
    if AIV.items() <= hccl_config.items() and not is_lone(group):
        extension.logger.warning(
            "ascend.communicator.groups.%s.expansion_mode is AIV beyond lone tensor parallelism on"
            " one machine: CANN does not support it for several groups of ranks of an NPU at a"
            " time, and collectives may hang; fix: remove it",
            group,
        )


Dispatched = tuple[torch.Tensor, ...] | tuple[torch.Tensor | list[torch.Tensor], ...]


class HCCLCommunicator(DeviceCommunicatorBase):
    """Collectives of one of vLLM's groups. Tensors are on this process's NPU; ranks are ranks in
    the group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM passes the local rank (parallel_state.py:540), which may differ from the device
        # index.
        self.device = torch.device("npu", torch.npu.current_device())
        self._set_options()
        if self.use_all2all:
            from ascend_communicator.moe.manager import HCCLAll2AllManager

            if self.all2all_backend not in (None, "naive", "allgather_reducescatter"):
                raise extension.RefusedError(
                    f"--all2all-backend {self.all2all_backend} is not supported on Ascend NPUs;"
                    " fix: remove it, and select a backend by ascend.communicator.all2all in"
                    " --additional-config"
                )
            assert self.device_group is not None
            self.all2all_manager = HCCLAll2AllManager(self.cpu_group, self.device_group)

    def _set_options(self) -> None:
        """Set this group's ``ascend.communicator.groups`` options, before its first call creates
        the HCCL communicator."""
        name = self.unique_name.partition(":")[0]
        given = options().hccl_config(name)
        if self.rank_in_group == 0:
            warn_of_vector_cores(name, given)
            if self.use_all2all:  # The all2all manager creates MC2's group.
                warn_of_vector_cores("mc2", options().hccl_config("mc2"))
        if hccl_config := expansion_mode(name) | given:
            group: Any = self.device_group
            of_group = group._get_backend(self.device).options
            of_group.hccl_config = {**of_group.hccl_config, **hccl_config}

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gather rows of all ranks, with a different number of rows per rank.

        Args:
            input_: ``[sizes[rank], ...]``, or a list of such tensors.
            dim: must be 0.
            sizes: rows of each rank; None if they are equal.

        Returns:
            ``[sum(sizes), ...]`` for each tensor.

        Raises:
            ValueError: another dimension, or sizes that do not match the group.
        """
        if dim:
            raise ValueError(f"all_gatherv along dimension {dim} is not supported; only along 0")
        if isinstance(input_, list):
            return [self._gather_rows(tensor, sizes) for tensor in input_]
        return self._gather_rows(input_, sizes)

    def _gather_rows(self, input_: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        sizes = self._check_sizes(sizes, len(input_))
        output = input_.new_empty((sum(sizes), *input_.shape[1:]))
        if len(set(sizes)) == 1:
            dist.all_gather_single(output, input_.contiguous(), group=self.device_group)
        else:
            torch_npu.distributed.all_gather_into_tensor_uneven(
                output, input_.contiguous(), sizes, group=self.device_group
            )
        return output

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Reduce over all ranks and scatter, with a different part size per rank.

        Args:
            input_: the same shape on all ranks.
            dim: the scattered dimension.
            sizes: part size of each rank along ``dim``; None if they are equal.

        Raises:
            ValueError: sizes do not match the group, or do not add up to the dimension.
        """
        rows = input_.movedim(dim, 0).contiguous()
        sizes = self._part_sizes(rows, sizes)
        output = rows.new_empty((sizes[self.rank_in_group], *rows.shape[1:]))
        return self._scatter_rows(rows, output, sizes).movedim(0, dim).contiguous()

    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: list[int] | None = None,
    ) -> torch.Tensor:
        """As ``reduce_scatterv`` into ``output``; without a copy if it is contiguous and ``dim`` is
        the first dimension."""
        if dim % input_.dim() or not output.is_contiguous():
            return output.copy_(self.reduce_scatterv(input_, dim, sizes))
        rows = input_.contiguous()
        return self._scatter_rows(rows, output, self._part_sizes(rows, sizes))

    def _scatter_rows(
        self, rows: torch.Tensor, output: torch.Tensor, sizes: list[int]
    ) -> torch.Tensor:
        if len(set(sizes)) == 1:
            dist.reduce_scatter_single(output, rows, group=self.device_group)
        else:
            torch_npu.distributed.reduce_scatter_tensor_uneven(
                output, rows, sizes, group=self.device_group
            )
        return output

    def _part_sizes(self, rows: torch.Tensor, sizes: list[int] | None) -> list[int]:
        if sizes is None and len(rows) % self.world_size:
            raise ValueError(
                f"{len(rows)} rows are not divisible by {self.world_size} ranks; give sizes"
            )
        part_sizes = self._check_sizes(sizes, len(rows) // self.world_size)
        if sum(part_sizes) != len(rows):
            raise ValueError(
                f"sizes {part_sizes} add up to {sum(part_sizes)} rows; the tensor has {len(rows)}"
            )
        return part_sizes

    def _check_sizes(self, sizes: list[int] | None, size: int) -> list[int]:
        if sizes is None:
            return [size] * self.world_size
        if len(sizes) != self.world_size:
            raise ValueError(f"got {len(sizes)} sizes for {self.world_size} ranks")
        return sizes

    def batch_isend_irecv(self, p2p_ops: list[dist.P2POp]) -> None:
        """Queue sends and receives as one group, also in both directions between two ranks; does
        not wait for them.

        Args:
            p2p_ops: ``torch.distributed.P2POp`` of this group.
        """
        for work in dist.batch_isend_irecv(p2p_ops) if p2p_ops else ():
            work.wait()

    # MoE dispatch and combine

    @property
    def _manager(self) -> All2AllManagerBase:
        if self.all2all_manager is None:
            raise RuntimeError(
                f"group {self.unique_name} has no all2all manager; use vLLM's group 'ep'"
            )
        return self.all2all_manager

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> Dispatched:
        """Dispatch tokens ``[tokens, hidden]`` with router logits and extra tensors to the ranks of
        their experts."""
        return self._manager.dispatch_router_logits(
            hidden_states, router_logits, is_sequence_parallel, extra_tensors
        )

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> Dispatched:
        """Dispatch tokens with top-k weights and ids ``[tokens, k]`` instead of router logits."""
        return self._manager.dispatch(
            hidden_states, topk_weights, topk_ids, is_sequence_parallel, extra_tensors
        )

    def combine(
        self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """Combine: sum the expert outputs of all ranks for this rank's tokens."""
        return self._manager.combine(hidden_states, is_sequence_parallel)

    def allocate_combine_input(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        is_sequence_parallel: bool = False,
    ) -> torch.Tensor | None:
        """Allocate an input of ``combine`` that needs no copy; None without special memory."""
        return self._manager.allocate_combine_input(shape, dtype, device, is_sequence_parallel)

    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """As ``combine``, into ``output``."""
        return self._manager.combine_into_output(hidden_states, output, is_sequence_parallel)

    def destroy(self) -> None:
        """Destroy the all2all manager. vLLM destroys the process groups."""
        if self.all2all_manager is not None:
            self.all2all_manager.destroy()
            self.all2all_manager = None
