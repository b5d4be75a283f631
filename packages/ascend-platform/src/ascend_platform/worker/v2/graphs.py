"""ACL graphs of the V2 runner: full graphs take the step's attention lengths at replay, and sizes fit the NPU's streams."""

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from ascend_platform import extension
from ascend_platform.graph import acl_graph
from ascend_platform.graph.capture_sizes import RESERVED_STREAMS, max_sizes_that_fit, num_graphs, subsample_sizes
from ascend_platform.vllm_overrides import override


class NPUCudaGraphManager(ModelCudaGraphManager):
    """ModelCudaGraphManager that gives NPUGraph the metadata of a step, which vLLM replays outside of a forward context.

    Attributes:
        attn_metadata: of the step that is prepared; set by the runner.
    """

    attn_metadata: Any = None

    def __init__(self, vllm_config: Any, device: torch.device, mode: CUDAGraphMode, decode_query_len: int, **named: Any) -> None:
        compilation = vllm_config.compilation_config
        if sizes := mode and compilation.cudagraph_capture_sizes:
            pieces = 1 + len(compilation.static_forward_context)
            max_decode_tokens = vllm_config.scheduler_config.max_num_seqs * decode_query_len

            def num_streams(sizes: list[int]) -> int:
                return num_graphs(mode, sizes, pieces, max_decode_tokens)  # one each, on one NPU

            count = max_sizes_that_fit(sizes, extension.chip().family.streams - RESERVED_STREAMS, num_streams)
            if count < len(sizes):
                extension.logger.warning(
                    "capturing graphs of %d of the %d requested sizes: all sizes need %d streams; fix: fewer "
                    'cudagraph_capture_sizes, or "cudagraph_mode": "FULL_DECODE_ONLY", in --compilation-config',
                    count,
                    len(sizes),
                    num_streams(sizes),
                )
                compilation.cudagraph_capture_sizes = subsample_sizes(sizes, count)
                compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]
        super().__init__(vllm_config, device, mode, decode_query_len, **named)

    def _capture_stream(self, desc: Any) -> Any:
        return torch.npu.current_stream(self.device)

    def run_fullgraph(self, desc: Any) -> Any:
        with set_forward_context(self.attn_metadata, self.vllm_config, num_tokens=desc.num_tokens):
            return super().run_fullgraph(desc)


def install() -> None:
    override("vllm.v1.worker.gpu.cudagraph_utils:torch", acl_graph.torch_with_graphs)
    override("vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager", NPUCudaGraphManager)
