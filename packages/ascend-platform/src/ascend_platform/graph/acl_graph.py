# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""ACL graphs: vLLM's CUDAGraphWrapper on ``torch.npu``, with attention's sequence lengths updated
at each replay.

vLLM's CUDAGraphWrapper and ``graph_capture`` call ``torch.cuda`` directly. Their modules get a
``torch`` in which the names that they use are those of ``torch.npu``. CANN's attention kernels take
sequence lengths as host lists, which a replay would repeat as captured. torch_npu captures such a
call as a task group that waits for an external event, and updates the group's arguments from
another stream before it records the event (``torch_npu/npu/graphs.py``).
"""

import contextlib
import functools
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch_npu
from torch_npu.npu.graphs import _GraphDispatchMode
from vllm.distributed.parallel_state import GraphCaptureContext
from vllm.forward_context import get_forward_context

from ascend_platform.attention import base


def module_with_overrides(module: ModuleType, **replaced: object) -> ModuleType:
    """Copy a module with some names replaced. Names that are added to the original later are found
    too."""
    copy = ModuleType(module.__name__)
    copy.__dict__.update(
        module.__dict__, __getattr__=lambda name: getattr(module, name), **replaced
    )
    return copy


class NotReplayedError(RuntimeError):
    """A graph cannot compute its input, and has not been replayed."""


class NPUGraph(torch_npu.npu.NPUGraph):
    """A graph that is replayed with the input's sequence lengths, from ``lengths`` of the metadata
    in the forward context, or from what each task was captured with (``base.graph_task``)."""

    _lengths_read: ClassVar[torch_npu.npu.Event | None] = None
    """Recorded after the last replay: until then a graph may still read its sequence lengths."""

    def __init__(self) -> None:
        # Each update ends by emptying torch_npu's task queue, so that its thread would only add two
        # switches to it.
        if _GraphDispatchMode.update_stream is None:
            _GraphDispatchMode.update_stream = torch_npu.npu.SyncLaunchStream()
        super().__init__()

    def replay(self) -> None:
        """Replay the graph.

        Raises:
            NotReplayedError: the arguments of a task are None.
        """
        tasks = self.graph_dispatch_mode.graph_dispatch_records
        if not tasks:
            super().replay()
            return
        # These may wait for the device, which a launched replay keeps.
        own = [task.arguments() for task in tasks if hasattr(task, "arguments")]
        if None in own:
            raise NotReplayedError
        stream, update_stream = torch.npu.current_stream(), self.graph_dispatch_mode.update_stream
        # This empties the task queue, so the event below, which the last replay queued, has been
        # recorded.
        super().replay()
        if NPUGraph._lengths_read is not None:
            update_stream.wait_event(NPUGraph._lengths_read)
        try:
            self.graph_dispatch_mode.update_capture_record(own or [_host_lengths()])
        except BaseException:
            for task in tasks:  # Release the graph, which waits for these events.
                task.event.record(update_stream)
            raise
        NPUGraph._lengths_read = stream.record_event(NPUGraph._lengths_read)


def _host_lengths() -> dict[str, Any]:
    """Merge ``lengths`` of all KV cache groups' metadata: the values are the same, the argument
    names differ by kernel."""
    attn_metadata: Any = get_forward_context().attn_metadata
    lengths: dict[str, Any] = {}
    for metadata in {id(metadata): metadata for metadata in attn_metadata.values()}.values():
        lengths |= getattr(metadata, "lengths", {})  # Those of sparse attention are on the device.
    return lengths


_is_drafter: ContextVar[bool] = ContextVar("a drafter's graphs are captured", default=False)


@functools.cache
def _pool_of_drafter(pool: Hashable) -> Any:
    """The memory pool of a drafter's graphs where the target captures into ``pool``."""
    return torch.npu.graph_pool_handle()


@contextlib.contextmanager
def drafter_pool() -> Iterator[None]:
    """Capture into a memory pool of the drafter's own.

    In one pool the drafter's graphs would overwrite the target's outputs, which are read after the
    drafter has run: prompt log-probabilities are computed of its hidden states then.
    """
    reset = _is_drafter.set(True)
    try:
        yield
    finally:
        _is_drafter.reset(reset)


class _Capture(torch_npu.npu.graph):
    """``torch.npu.graph`` that sets the dispatch mode of ``attention.base.graph_task``; see
    :func:`drafter_pool`."""

    def __init__(self, npu_graph: Any, pool: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(
            npu_graph, _pool_of_drafter(pool) if _is_drafter.get() else pool, *args, **kwargs
        )

    def __enter__(self) -> None:
        super().__enter__()
        self._reset = base.capturing.set(self.npu_graph.graph_dispatch_mode)

    def __exit__(self, *raised: Any) -> None:
        base.capturing.reset(self._reset)
        super().__exit__(*raised)


@contextlib.contextmanager
def graph_capture(device: torch.device) -> Iterator[GraphCaptureContext]:
    """Provide the capture stream; replaces ``vllm.distributed.parallel_state.graph_capture``.

    vLLM's also prepares the communicators of CUDA and XPU. HCCL collectives are captured like other
    operators.
    """
    stream = torch.npu.Stream(device)
    stream.wait_stream(torch.npu.current_stream(device))
    with torch.npu.stream(stream):
        yield GraphCaptureContext(stream)


def weak_ref_tensor(tensor: Any) -> Any:
    """Return a tensor that does not own its memory; vLLM's version calls a CUDA operator."""
    has_memory = isinstance(tensor, torch.Tensor) and tensor.numel()
    return torch_npu._C._weak_ref_tensor(tensor) if has_memory else tensor


torch_with_graphs = module_with_overrides(
    torch, cuda=module_with_overrides(torch.cuda, CUDAGraph=NPUGraph, graph=_Capture)
)
