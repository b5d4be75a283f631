"""Row-parallel linear layers whose product and all-reduce are one operator, npu_mm_all_reduce_base, in prefill steps.

By torch_npu's documentation the operator is for prefill alone, and for tensor parallelism within a machine of Atlas A2.
"""

from typing import Any

import torch
import torch_npu
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

from ascend_platform.config import performance


@RowParallelLinear.register_oot
class NPURowParallelLinear(RowParallelLinear):
    """vLLM's layer, with the option ``ascend.platform.matmul_all_reduce``. Quantized layers, biases and LoRA take vLLM's path."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.fused_above: int | None = None
        """The tokens of a decode step; None where the layer is not fused."""
        config = get_current_vllm_config()
        plain = type(self.quant_method) is UnquantizedLinearMethod and self.bias is None and self.input_is_parallel
        plain = plain and self.reduce_results and self.tp_size > 1
        if plain and self.weight.dtype != torch.float32 and performance.enabled(config, performance.MATMUL_ALL_REDUCE):
            self.fused_above = performance.max_decode_tokens(config)

    def forward(self, input_: torch.Tensor) -> Any:
        if self.fused_above is None or len(input_) <= self.fused_above or torch.npu.is_current_stream_capturing():
            return super().forward(input_)
        group: Any = get_tp_group().device_group
        weight: Any = self.weight
        name = group._get_backend(input_.device).get_hccl_comm_name(group.rank())
        output = torch_npu.npu_mm_all_reduce_base(input_.contiguous(), weight.t(), name)
        return (output, None) if self.return_bias else output
