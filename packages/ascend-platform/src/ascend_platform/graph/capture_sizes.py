"""Which graphs a runner captures: as many sizes as the NPU has streams for, on all ranks the same.

A graph takes one of the NPU's streams for each stream that it captured, for as long as it lives. A piecewise graph is one graph
for each piece between two attentions, so that sizes times layers meets the limit.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.distributed import get_dp_group, get_ep_group, get_tp_group
from vllm.distributed.parallel_state import get_world_group, is_global_first_rank
from vllm.platforms import current_platform

from ascend_platform import extension
from ascend_platform.vllm_overrides import require

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
else:
    Runner = object  # a mixin: the runner that it is mixed into names vLLM's

RESERVED = 184
"""Streams left to torch_npu's pools, HCCL and whoever else uses the NPU."""

NO_STREAMS = ("207008", "207005")
"""CANN's codes when the streams run out (vllm-project/vllm-ascend, issues 9564 and 9691)."""


require("vllm.platforms.interface:Platform._global_graph_pool")
require("vllm.compilation.cuda_graph:CUDAGraphWrapper._all_instances")


class OutOfStreams(RuntimeError):
    """A capture failed on some rank for want of streams."""


class CaptureMixin(Runner):
    """Put before vLLM's GPUModelRunner."""

    def _check_and_update_cudagraph_mode(self: Any, *args: Any, **kwargs: Any) -> None:
        """Choose the mode as vLLM does, then drop sizes until the graphs fit."""
        super()._check_and_update_cudagraph_mode(*args, **kwargs)
        self._graph_mode = self.cudagraph_dispatcher.cudagraph_mode
        if self._graph_mode == CUDAGraphMode.NONE:
            return
        asked = self.compilation_config.cudagraph_capture_sizes
        chip = extension.chip()
        limit = chip.family.streams
        count = _least(fitting(asked, limit - RESERVED, self._streams_for))
        if count < len(asked):
            self._take_sizes(spread(asked, count))
            _warn(
                "graphs of %d of the %d sizes asked for will be captured (%s tokens): all would take %d streams, and %s has %d, "
                "of which %d are kept free; steps are padded further. Fewer streams are needed with fewer "
                'cudagraph_capture_sizes or with "cudagraph_mode": "FULL_DECODE_ONLY" in --compilation-config',
                count,
                len(asked),
                ", ".join(map(str, self.compilation_config.cudagraph_capture_sizes)),
                self._streams_for(asked),
                chip.name,
                limit,
                RESERVED,
            )

    def capture_model(self: Any) -> int:
        """Capture as vLLM does; with half the sizes, again and again, where streams run out all the same.

        Without graphs, nothing: vLLM's line that somebody may have set the mode by hand would be wrong.
        """
        while self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            try:
                return super().capture_model()
            except OutOfStreams as error:
                reason = str(error)
            sizes = self.compilation_config.cudagraph_capture_sizes
            self.drop_graphs()
            if len(sizes) == 1:
                self.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
                self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE)
                _warn("no graphs are captured and every step runs eagerly: %s", reason)
                break
            self._take_sizes(spread(sizes, len(sizes) // 2))
            now = self.compilation_config.cudagraph_capture_sizes
            _warn("graphs of %d of %d sizes are captured (%s tokens): %s", len(now), len(sizes), ", ".join(map(str, now)), reason)
        return 0

    def drop_graphs(self: Any) -> None:
        """Give back all graphs and their memory. What is captured later goes into another pool of memory.

        torch_npu takes no capture into a pool in which one failed to begin (``beginAllocateToPool: already recording``).
        """
        torch.npu.synchronize()
        CUDAGraphWrapper.clear_all_graphs()
        type(current_platform)._global_graph_pool = None
        pool = current_platform.get_global_graph_pool()
        for wrapper in CUDAGraphWrapper._all_instances:
            wrapper.graph_pool = pool
        torch.npu.empty_cache()

    def _warmup_and_capture(self: Any, *args: Any, **kwargs: Any) -> None:
        """Capture one size; what fails on one rank for want of streams fails on all, which would wait for that one else."""
        failure = ""
        try:
            super()._warmup_and_capture(*args, **kwargs)
        except RuntimeError as error:
            failure = str(error)
            if not any(code in failure for code in NO_STREAMS):
                raise
        if _least(0 if failure else 1) == 0:
            raise OutOfStreams(failure.strip().splitlines()[-1] if failure else "another rank has no streams left")

    def _take_sizes(self: Any, sizes: list[int]) -> None:
        self.compilation_config.cudagraph_capture_sizes = sizes
        self.compilation_config.max_cudagraph_capture_size = sizes[-1]
        for keys in self.cudagraph_dispatcher.cudagraph_keys.values():
            keys.clear()
        self.cudagraph_dispatcher.initialize_cudagraph_keys(self._graph_mode, self.uniform_decode_query_len)

    def _streams_for(self: Any, sizes: list[int]) -> int:
        """A stream for each graph, and one for each group whose collectives are in it: torch_npu's groups have their own."""
        groups = (get_tp_group(), get_dp_group(), *([get_ep_group()] if self.model_config.is_moe else []))
        each = 1 + sum(group.world_size > 1 for group in groups)
        pieces = 1 + sum(len(group.layer_names) for group in self.kv_cache_config.kv_cache_groups)
        return each * graphs_for(self._graph_mode, sizes, pieces, self.uniform_decode_query_len * self.max_num_reqs)


def graphs_for(mode: CUDAGraphMode, sizes: list[int], pieces: int, decoded: int) -> int:
    """How many graphs these sizes are.

    Args:
        pieces: graphs of one piecewise size: the model's parts between its attentions.
        decoded: tokens of the largest decode step, behind which full graphs for decode alone end.
    """
    piecewise = pieces * len(sizes) if mode.has_mode(CUDAGraphMode.PIECEWISE) else 0
    full = [size for size in sizes if size <= decoded or not mode.separate_routine()]
    return piecewise + (len(full) if mode.has_mode(CUDAGraphMode.FULL) else 0)


def fitting(sizes: list[int], most: int, streams: Callable[[list[int]], int]) -> int:
    """How many of the sizes take at most so many streams, and one in any case."""
    count = len(sizes)
    while count > 1 and streams(spread(sizes, count)) > most:
        count -= 1
    return count


def spread(sizes: list[int], count: int) -> list[int]:
    """So many of the sizes, the first and the last among them, evenly."""
    if count == 1:
        return sizes[-1:]
    return [sizes[round(i * (len(sizes) - 1) / (count - 1))] for i in range(count)]


def _least(number: int) -> int:
    """The smallest of all ranks' numbers."""
    world = get_world_group()
    if world.world_size > 1:
        found = torch.tensor(number)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=world.cpu_group)
        number = int(found)
    return number


def _warn(message: str, *arguments: object) -> None:
    if is_global_first_rank():
        extension.logger.warning(message, *arguments)
