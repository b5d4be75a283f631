"""Graphs: vLLM's wrapper for CUDA graphs on ``torch.npu``'s, whose attention gets its lengths anew for each replay.

vLLM's CUDAGraphWrapper and ``graph_capture`` write ``torch.cuda`` in their own text; their modules are given a view of torch in
which the names that they use are ``torch.npu``'s. CANN's attention takes the sequence lengths as lists on the host, which a
replay would repeat as they were when they were captured. torch_npu captures such a call as a task group behind an external
event, and replaces the group's arguments from another stream before the event is recorded (``torch_npu/npu/graphs.py``).
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch_npu
from vllm.distributed.parallel_state import GraphCaptureContext
from vllm.forward_context import get_forward_context

from ascend_platform.attention import base
from ascend_platform.vllm_overrides import override


def view(module: ModuleType, **replaced: object) -> ModuleType:
    """A module with the contents of another, some names replaced; names that appear there later are found too."""
    seen = ModuleType(module.__name__)
    seen.__dict__.update(module.__dict__, __getattr__=lambda name: getattr(module, name), **replaced)
    return seen


class NPUGraph(torch_npu.npu.NPUGraph):
    """A graph whose attention gets this step's lengths when it is replayed.

    They are the attribute ``lengths`` of the attention's metadata in vLLM's forward context.
    """

    _read: ClassVar[torch_npu.npu.Event | None] = None
    """Recorded behind the last replay: a graph still reads the lengths it was given until then."""

    def replay(self) -> None:
        tasks = self.graph_dispatch_mode.graph_dispatch_records
        if not tasks:
            super().replay()
            return
        stream, updates = torch.npu.current_stream(), self.graph_dispatch_mode.update_stream
        if NPUGraph._read is not None:
            updates.wait_event(NPUGraph._read)
        super().replay()
        try:
            self.graph_dispatch_mode.update_capture_record([_lengths()])
        except BaseException:
            for task in tasks:  # nothing must wait for events that no longer come
                task.event.record(updates)
            raise
        NPUGraph._read = stream.record_event(NPUGraph._read)


def _lengths() -> dict[str, Any]:
    """Of all layers: groups of KV caches have their own metadata, with the same lengths, and kernels their own names for them."""
    metadata: Any = get_forward_context().attn_metadata
    found: dict[str, Any] = {}
    for each in {id(each): each for each in metadata.values()}.values():
        found |= each.lengths
    return found


class _Capture(torch_npu.npu.graph):
    """``torch.npu.graph``; a task in it is one that ``dense.graph_task`` finds."""

    def __enter__(self) -> None:
        super().__enter__()
        base.capturing = self.npu_graph.graph_dispatch_mode

    def __exit__(self, *raised: Any) -> None:
        base.capturing = None
        super().__exit__(*raised)


@contextlib.contextmanager
def graph_capture(device: torch.device) -> Iterator[GraphCaptureContext]:
    """A stream to capture on, in place of ``vllm.distributed.parallel_state.graph_capture``.

    That one also prepares the communicators of CUDA and XPU; HCCL's collectives are captured like other work.
    """
    stream = torch.npu.Stream(device)
    stream.wait_stream(torch.npu.current_stream(device))
    with torch.npu.stream(stream):
        yield GraphCaptureContext(stream)


def _weak_ref_tensor(tensor: Any) -> Any:
    """A tensor of the same memory that does not keep it; vLLM's own calls a CUDA operator."""
    return torch_npu._C._weak_ref_tensor(tensor) if isinstance(tensor, torch.Tensor) and tensor.numel() else tensor


override("vllm.compilation.cuda_graph:torch", view(torch, cuda=view(torch.cuda, CUDAGraph=NPUGraph, graph=_Capture)))
override("vllm.utils.torch_utils:weak_ref_tensor", _weak_ref_tensor)
