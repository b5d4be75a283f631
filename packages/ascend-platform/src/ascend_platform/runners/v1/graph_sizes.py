# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Graph mode and capture sizes of the V1 runner, as the NPU's streams allow."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode

from ascend_platform.graph import capture_sizes

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
        mode = self.cudagraph_dispatcher.cudagraph_mode
        if mode == CUDAGraphMode.NONE:
            return
        pieces = 1 + sum(len(group.layer_names) for group in self.kv_cache_config.kv_cache_groups)
        decode_tokens = self.uniform_decode_query_len * self.max_num_reqs
        self._create_encoder_cudagraph_manager()  # It counts its graphs.
        self._graph_sizes = capture_sizes.GraphSizes(self.vllm_config, mode, pieces, decode_tokens)
        if self._graph_sizes.limit():
            self._renew_keys(mode)

    def capture_model(self: Any) -> int:
        """Capture graphs as vLLM does, and retry with half of the sizes when the streams run out.

        In mode NONE vLLM's method is not called, because its warning about a mode set by hand would
        be wrong, and the encoder is captured by itself.
        """
        while self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            self._graph_sizes.renew_pool()
            try:
                return super().capture_model()
            except capture_sizes.OutOfStreamsError as error:
                reason = str(error)
            if self._graph_sizes.halve(reason):
                self._renew_keys(self.cudagraph_dispatcher.cudagraph_mode)
            else:
                self.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
                self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE)
        return self._capture_encoder()

    def profile_cudagraph_memory(self: Any) -> int:
        """Estimate graph memory as vLLM does, whose method clears all wrappers' graphs, with this
        runner's wrappers only; when the streams run out, with half of the sizes."""
        with capture_sizes.without_other_engines(self.compilation_config):
            while True:
                try:
                    return super().profile_cudagraph_memory()
                except capture_sizes.OutOfStreamsError as error:
                    reason = str(error)
                # vLLM has dropped the keys, and makes those of the sizes that are left.
                if not self._graph_sizes.halve(reason):
                    self.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
                    return 0

    _freeze_gc = staticmethod(capture_sizes.freeze_gc)

    def _warmup_and_capture(self: Any, *args: Any, **kwargs: Any) -> None:
        """Capture one size. If one rank runs out of streams, fail on all; the others would hang in
        a collective."""
        with capture_sizes.failing_on_all_ranks():
            super()._warmup_and_capture(*args, **kwargs)

    def _renew_keys(self: Any, mode: CUDAGraphMode) -> None:
        for keys in self.cudagraph_dispatcher.cudagraph_keys.values():
            keys.clear()
        self.cudagraph_dispatcher.initialize_cudagraph_keys(mode, self.uniform_decode_query_len)
