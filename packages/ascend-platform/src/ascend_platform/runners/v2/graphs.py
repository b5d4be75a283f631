# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""ACL graphs of the V2 runner: full graphs get the step's sequence lengths at replay, and sizes
fit the NPU's streams."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

from ascend_platform.graph import capture_sizes


class GraphManager(CudaGraphManager):
    """CudaGraphManager whose graphs fit the NPU's streams, and are in a memory pool of their
    engine's own.

    Attributes:
        attn_metadata: of the step that is prepared; set by the runner.
    """

    attn_metadata: Any = None

    def _init_candidates(self) -> None:
        layers = self.compilation_config.static_forward_context.values()
        pieces = 1 + sum(isinstance(layer, AttentionLayerBase) for layer in layers)
        decode_tokens, mode = self.max_num_reqs * self.decode_query_len, self.cudagraph_mode
        self._sizes = capture_sizes.GraphSizes(self.vllm_config, mode, pieces, decode_tokens)
        if self.cudagraph_mode and self.compilation_config.cudagraph_capture_sizes:
            self._sizes.limit()
        super()._init_candidates()

    def capture(self, create_forward_fn: Callable[..., Any], *arguments: Any) -> None:
        """Capture graphs as vLLM does, and retry with half of the sizes when the streams run out on
        some rank."""

        def create(desc: Any, warmup: bool) -> Any:
            if warmup:  # The sizes before this one have been captured.
                with capture_sizes.failing_on_all_ranks():
                    pass
            return create_forward_fn(desc, warmup)

        is_profiling = self._max_full_descs_to_capture is not None  # in a pool of vLLM's
        while self._capture_descs:
            if not is_profiling:
                self.pool = self._sizes.renew_pool()
            is_profiling = False
            try:
                with capture_sizes.failing_on_all_ranks():
                    super().capture(create, *arguments)
                return
            except capture_sizes.OutOfStreamsError as error:
                reason = str(error)
            torch.npu.synchronize()
            self.release_graphs()
            self._candidates.clear()
            self._capture_descs.clear()
            if self._sizes.halve(reason):
                super()._init_candidates()

    def run_fullgraph(self, desc: Any) -> Any:
        engines = self.vllm_config.parallel_config.data_parallel_size
        # All ranks replay this size; otherwise vLLM would synchronize again.
        across = torch.full((engines,), desc.num_tokens, dtype=torch.int32) if engines > 1 else None
        with set_forward_context(
            self.attn_metadata, self.vllm_config, desc.num_tokens, num_tokens_across_dp=across
        ):
            return super().run_fullgraph(desc)

    def _capture_stream(self, desc: Any) -> Any:
        return torch.npu.current_stream(self.device)


class NPUCudaGraphManager(ModelCudaGraphManager, GraphManager):  # type: ignore[misc]
    """ModelCudaGraphManager on the NPU."""
