"""SwiGLU on a fused NPU operator, registered by ``CustomOp.register_oot`` on import.

Shapes, dtypes and limits of the operators are those of ``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel.
"""

import torch
import torch_npu
from vllm.model_executor.layers.activation import SiluAndMul


@SiluAndMul.register_oot
class NPUSiluAndMul(SiluAndMul):
    """``silu(x[..., :d]) * x[..., d:]`` by npu_swiglu; x ``[..., 2 d]`` of float32, float16 or bfloat16."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return torch_npu.npu_swiglu(x)
