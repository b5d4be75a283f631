# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Graph mode and capture sizes of the V1 runner, as the NPU's streams allow."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform

from ascend_platform.graph import capture_sizes
from ascend_platform.vllm_overrides import without

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
else:
    Runner = object  # A mixin: the runner class that uses it names vLLM's base class.


class GraphSizeMixin(Runner):
    """Mixin for vLLM's GPUModelRunner that limits the capture sizes."""

    def _check_and_update_cudagraph_mode(
        self: Any, backends: list[set[Any]], groups: list[Any], *args: Any, **named: Any
    ) -> None:
        """Choose the graph mode as vLLM does, by what all pipeline stages support, then remove
        sizes until the graphs fit."""
        if others := capture_sizes.support_of_other_stages(self.vllm_config, backends, groups):
            backends, groups = [*backends, {others}], [*groups, SimpleNamespace(kv_cache_spec=None)]
        super()._check_and_update_cudagraph_mode(backends, groups, *args, **named)
        self._graph_mode = self.cudagraph_dispatcher.cudagraph_mode
        if self._graph_mode == CUDAGraphMode.NONE:
            return
        requested = self.compilation_config.cudagraph_capture_sizes
        if kept := capture_sizes.sizes_that_fit(requested, self._num_streams):
            self._set_sizes(kept)

    def capture_model(self: Any) -> int:
        """Capture graphs as vLLM does, and retry with half of the sizes when the streams run out.

        In mode NONE vLLM's method is not called, because its warning about a mode set by hand would
        be wrong.
        """
        while self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            # After a failed capture torch_npu cannot capture into the same pool
            # (beginAllocateToPool: already recording). In a shared pool, another engine's replay
            # would overwrite this one's outputs.
            pool = current_platform.graph_pool_handle()
            for wrapper in capture_sizes.wrappers_of(self.compilation_config):
                wrapper.graph_pool = pool
            try:
                return super().capture_model()
            except capture_sizes.OutOfStreamsError as error:
                reason = str(error)
            torch.npu.synchronize()
            capture_sizes.clear_graphs(self.compilation_config)
            torch.npu.empty_cache()
            kept = capture_sizes.half_of_sizes(
                self.compilation_config.cudagraph_capture_sizes, reason
            )
            if not kept:
                self.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
                self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE)
                break
            self._set_sizes(kept)
        return 0

    def profile_cudagraph_memory(self: Any) -> int:
        """Estimate graph memory as vLLM does, whose method clears all wrappers' graphs, with this
        runner's wrappers only."""
        others = set(CUDAGraphWrapper._all_instances).difference(
            capture_sizes.wrappers_of(self.compilation_config)
        )
        with without("vllm.compilation.cuda_graph:CUDAGraphWrapper._all_instances", others):
            return super().profile_cudagraph_memory()

    _freeze_gc = staticmethod(capture_sizes.freeze_gc)

    def _warmup_and_capture(self: Any, *args: Any, **kwargs: Any) -> None:
        """Capture one size. If one rank runs out of streams, fail on all; the others would hang in
        a collective."""
        with capture_sizes.failing_on_all_ranks():
            super()._warmup_and_capture(*args, **kwargs)

    def _set_sizes(self: Any, sizes: list[int]) -> None:
        self.compilation_config.cudagraph_capture_sizes = sizes
        self.compilation_config.max_cudagraph_capture_size = sizes[-1]
        for keys in self.cudagraph_dispatcher.cudagraph_keys.values():
            keys.clear()
        self.cudagraph_dispatcher.initialize_cudagraph_keys(
            self._graph_mode, self.uniform_decode_query_len
        )

    def _num_streams(self: Any, sizes: list[int]) -> int:
        """Count the streams of the graphs of these sizes, and those of HCCL."""
        pieces = 1 + sum(len(group.layer_names) for group in self.kv_cache_config.kv_cache_groups)
        graphs = capture_sizes.num_graphs(
            self._graph_mode, sizes, pieces, self.uniform_decode_query_len * self.max_num_reqs
        )
        return capture_sizes.num_streams_here(graphs, self.vllm_config)
