# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Layers of tensor parallelism: vocabulary embedding in few operators, and row-parallel matmuls
fused with their all-reduce.

By torch_npu's documentation npu_mm_all_reduce_base is only for prefill, and for tensor parallelism
within a machine of Atlas A2.
"""

import functools
from typing import Any

import torch
import torch_npu
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

from ascend_platform.config import options, performance
from ascend_platform.overrides.guard import override

_native = vocab_parallel_embedding.get_masked_input_and_mask


@functools.wraps(_native)
def get_masked_input_and_mask(
    input_: torch.Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local row of each token id, and whether the id belongs to another rank; rows of those are
    any valid one.

    Only on CUDA torch.compile fuses vLLM's thirteen operators into one kernel. A shard with added
    tokens, or without any, takes vLLM's.
    """
    if (
        added_vocab_start_index < added_vocab_end_index
        or org_vocab_start_index == org_vocab_end_index
    ):
        ranges = (org_vocab_start_index, org_vocab_end_index, num_org_vocab_padding)
        return _native(input_, *ranges, added_vocab_start_index, added_vocab_end_index)
    local = input_ - org_vocab_start_index
    rows = local.clamp(0, org_vocab_end_index - org_vocab_start_index - 1)
    return rows, rows != local


override(
    "vllm.model_executor.layers.vocab_parallel_embedding:get_masked_input_and_mask",
    get_masked_input_and_mask,
)


@RowParallelLinear.register_oot
class NPURowParallelLinear(RowParallelLinear):
    """vLLM's layer, with the option ``ascend.platform.matmul_all_reduce``. Quantized layers, biases
    and LoRA take vLLM's path."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.fused_above: int | None = None
        """The tokens of a decode step; None where the layer is not fused."""
        config = get_current_vllm_config()
        plain = (
            type(self.quant_method) is UnquantizedLinearMethod
            and self.bias is None
            and self.input_is_parallel
        )
        plain = plain and self.reduce_results and self.tp_size > 1
        if (
            plain
            and self.weight.dtype != torch.float32
            and options.platform(config).matmul_all_reduce
        ):
            self.fused_above = performance.max_decode_tokens(config)

    def forward(self, input_: torch.Tensor) -> Any:
        if (
            self.fused_above is None
            or len(input_) <= self.fused_above
            or torch.npu.is_current_stream_capturing()
        ):
            return super().forward(input_)
        group: Any = get_tp_group().device_group
        weight: Any = self.weight
        name = group._get_backend(input_.device).get_hccl_comm_name(group.rank())
        output = torch_npu.npu_mm_all_reduce_base(input_.contiguous(), weight.t(), name)
        return (output, None) if self.return_bias else output
