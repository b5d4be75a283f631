# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Graphs of vision encoders with the V1 runner."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from ascend_platform.graph import acl_graph, encoder_graphs

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
else:
    Runner = object  # A mixin: the runner class that uses it names vLLM's base class.


class EncoderGraphMixin(Runner):
    """Mixin for vLLM's GPUModelRunner with graphs of the encoder on the NPU."""

    @torch.inference_mode()
    def _create_encoder_cudagraph_manager(self: Any) -> Any:
        """A manager, or None where ``cudagraph_mm_encoder`` is not set or vLLM does not serve the
        model's encoder."""
        model = self.get_model()
        if not (self.compilation_config.cudagraph_mm_encoder and self.supports_mm_inputs):
            return None
        if not encoder_graphs.is_served(model):
            return None
        return encoder_graphs.NPUEncoderGraphManager(
            self.vllm_config, self.device, self.dtype, model
        )

    def _capture_encoder(self: Any) -> int:
        """Capture the encoder where steps have no graphs, as the V2 runner does; returns the bytes
        of the graphs."""
        if self.model_config.enforce_eager:
            return 0
        self._maybe_init_encoder_cudagraph_manager()
        if self.encoder_cudagraph_manager is None:
            return 0
        torch.npu.synchronize()
        torch.npu.empty_cache()
        free = torch.npu.mem_get_info()[0]
        with self._freeze_gc(), acl_graph.graph_capture(self.device):
            self.encoder_cudagraph_manager.capture(current_platform.graph_pool_handle())
            torch.npu.synchronize()
        return free - torch.npu.mem_get_info()[0]
