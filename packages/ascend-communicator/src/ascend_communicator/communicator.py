"""vLLM's device communicator over HCCL, through torch_npu's process group ``hccl``.

What is inherited from ``DeviceCommunicatorBase`` is one HCCL call already (``all_reduce`` works in place, as its caller in
``vllm/distributed/parallel_state.py`` allows). Ours are the calls that the base class lacks, and the dispatch and combine of
experts' tokens, which the base class passes through unchanged: wrong results without an error.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch_npu
from ascend_platform import extension
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase, DeviceCommunicatorBase

from ascend_communicator import GROUP_OPTIONS

INHERITED = {
    "all_reduce": "HcclAllReduce in place",
    "all_gather": "HcclAllGather, and a copy if the dimension is not the first",
    "reduce_scatter": "HcclReduceScatter, with copies if the dimension is not the first",
    "gather": "torch_npu's, on HcclAllGather: HCCL has no gather",
    "send": "HcclSend",
    "recv": "HcclRecv",
    "broadcast": "HcclBroadcast",
    "get_symmetric_memory_buffer": "None: torch_npu has no symmetric memory for HCCL's collectives",
    "suspend": "nothing: HCCL does not give its buffers back while the group lives",
    "resume": "nothing, as suspend",
    "checkpoint_prepare": "nothing, as suspend",
    "checkpoint_restore": "nothing, as suspend",
}
"""The base class's methods that serve as they are, and on what. A test holds this list against the base class."""

Dispatched = tuple[torch.Tensor, ...] | tuple[torch.Tensor | list[torch.Tensor], ...]


class HCCLCommunicator(DeviceCommunicatorBase):
    """Collectives of one of vLLM's groups. All tensors are on this process's NPU; ranks are those within the group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM gives the local rank's number (parallel_state.py:540), which need not be the device's
        self.device = torch.device("npu", torch.npu.current_device())
        self._take_options()
        if self.use_all2all:
            from ascend_communicator.moe.manager import ExpertManager

            if self.all2all_backend not in (None, "naive", "allgather_reducescatter"):
                raise ValueError(
                    f"--all2all-backend {self.all2all_backend} is not for Ascend NPUs; leave it out and choose with "
                    "ascend.communicator.all2all in --additional-config"
                )
            assert self.device_group is not None
            self.all2all_manager = ExpertManager(self.cpu_group, self.device_group)

    def _take_options(self) -> None:
        """Give this group what ``ascend.communicator.groups`` has for it; HCCL's part of a group is made with its first call."""
        groups = cast(Mapping[str, Mapping[str, int]], extension.config("communicator").get("groups", {}))
        given = groups.get(self.unique_name.partition(":")[0], {})
        if given:
            group: Any = self.device_group
            options = group._get_backend(self.device).options
            options.hccl_config = {**options.hccl_config, **{GROUP_OPTIONS[key][0]: value for key, value in given.items()}}

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """The rows of all ranks, one rank's after another's.

        Args:
            input_: ``[sizes[rank], ...]``, or several such tensors.
            dim: 0.
            sizes: how many rows each rank has; None if all have the same.

        Returns:
            ``[sum(sizes), ...]`` for each tensor.

        Raises:
            ValueError: another dimension, or sizes that are not this group's.
        """
        if dim:
            raise ValueError(f"all_gatherv along dimension {dim} is not supported; only along 0")
        if isinstance(input_, list):
            return [self._gather_rows(tensor, sizes) for tensor in input_]
        return self._gather_rows(input_, sizes)

    def _gather_rows(self, input_: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        sizes = self._checked(sizes, len(input_))
        output = input_.new_empty((sum(sizes), *input_.shape[1:]))
        if len(set(sizes)) == 1:
            dist.all_gather_single(output, input_.contiguous(), group=self.device_group)
        else:
            torch_npu.distributed.all_gather_into_tensor_uneven(output, input_.contiguous(), sizes, group=self.device_group)
        return output

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """This rank's part of the sum over all ranks.

        Args:
            input_: one shape on all ranks.
            dim: the dimension that is divided.
            sizes: how large each rank's part is; None if all are the same.

        Raises:
            ValueError: sizes that are not this group's, or do not add up to the dimension.
        """
        rows = input_.movedim(dim, 0).contiguous()
        sizes = self._part_sizes(rows, sizes)
        output = rows.new_empty((sizes[self.rank_in_group], *rows.shape[1:]))
        return self._scatter_rows(rows, output, sizes).movedim(0, dim).contiguous()

    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """As ``reduce_scatterv``, into ``output``; without a copy if that is contiguous and the dimension is the first."""
        if dim % input_.dim() or not output.is_contiguous():
            return output.copy_(self.reduce_scatterv(input_, dim, sizes))
        rows = input_.contiguous()
        return self._scatter_rows(rows, output, self._part_sizes(rows, sizes))

    def _scatter_rows(self, rows: torch.Tensor, output: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        if len(set(sizes)) == 1:
            dist.reduce_scatter_single(output, rows, group=self.device_group)
        else:
            torch_npu.distributed.reduce_scatter_tensor_uneven(output, rows, sizes, group=self.device_group)
        return output

    def _part_sizes(self, rows: torch.Tensor, sizes: list[int] | None) -> list[int]:
        if sizes is None and len(rows) % self.world_size:
            raise ValueError(f"{len(rows)} rows are not divisible by {self.world_size} ranks; give sizes")
        found = self._checked(sizes, len(rows) // self.world_size)
        if sum(found) != len(rows):
            raise ValueError(f"sizes {found} are {sum(found)} rows together; the tensor has {len(rows)}")
        return found

    def _checked(self, sizes: list[int] | None, own: int) -> list[int]:
        if sizes is None:
            return [own] * self.world_size
        if len(sizes) != self.world_size:
            raise ValueError(f"{len(sizes)} sizes were given for {self.world_size} ranks")
        return sizes

    def batch_isend_irecv(self, p2p_ops: list[dist.P2POp]) -> None:
        """Carry out sends and receives as one group, which may go both ways between two ranks; returns when they are queued.

        Args:
            p2p_ops: ``torch.distributed.P2POp`` of this group.
        """
        for work in dist.batch_isend_irecv(p2p_ops) if p2p_ops else ():
            work.wait()

    # Experts' tokens

    @property
    def _experts(self) -> All2AllManagerBase:
        if self.all2all_manager is None:
            raise RuntimeError(f"group {self.unique_name} does not carry experts' tokens; vLLM's group 'ep' does")
        return self.all2all_manager

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> Dispatched:
        """Tokens ``[tokens, hidden]`` and what belongs to them, from the ranks that have them to those that need them."""
        return self._experts.dispatch_router_logits(hidden_states, router_logits, is_sequence_parallel, extra_tensors)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> Dispatched:
        """As ``dispatch_router_logits``, with the chosen experts and their weights ``[tokens, k]`` in place of logits."""
        return self._experts.dispatch(hidden_states, topk_weights, topk_ids, is_sequence_parallel, extra_tensors)

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """The sum over ranks of what their experts made of this rank's tokens."""
        return self._experts.combine(hidden_states, is_sequence_parallel)

    def allocate_combine_input(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, is_sequence_parallel: bool = False
    ) -> torch.Tensor | None:
        """Memory that ``combine`` can read without a copy, or None if there is none of a special kind."""
        return self._experts.allocate_combine_input(shape, dtype, device, is_sequence_parallel)

    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """As ``combine``, into ``output``."""
        return self._experts.combine_into_output(hidden_states, output, is_sequence_parallel)

    def destroy(self) -> None:
        """Let go of the experts' manager. The process groups are vLLM's to destroy."""
        if self.all2all_manager is not None:
            self.all2all_manager.destroy()
            self.all2all_manager = None
