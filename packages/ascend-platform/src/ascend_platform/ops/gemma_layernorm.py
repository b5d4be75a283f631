# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Gemma's RMSNorm on a fused NPU operator, registered by ``CustomOp.register_oot`` on import.

Shapes, dtypes and limits of the operators are those of ``torch_npu/_op_plugin_docs.py`` in the
torch_npu wheel.
"""

from typing import Any

import torch
import torch_npu
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from ascend_platform import host
from ascend_platform.ops.layernorm import BiasedNorm, Normed


@GemmaRMSNorm.register_oot
class NPUGemmaRMSNorm(GemmaRMSNorm, BiasedNorm):
    """RMSNorm with the weight ``1 + weight`` by npu_gemma_rms_norm, which takes contiguous inputs
    of the weight's dtype, or by npu_rms_norm, which takes a weight in float32.

    A residual is added by an operator of its own: npu_add_rms_norm takes weights of the input's
    dtype only, to which ``1 + weight`` would have to be rounded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        family = host.chip_family()
        self.is_fused = not family.lacks("npu_gemma_rms_norm")
        # Tests of torch_npu have a weight in float32 only on chips with bfloat16.
        self.has_norm = not family.lacks("npu_rms_norm") and "bfloat16" in family.dtypes
        self.make_bias(self.weight)

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """``rms_norm(x) * (1 + weight)``; with a residual of x, that of ``x + residual``, and the
        sum."""
        return self.with_bias(self._without_bias(x, residual))

    def _without_bias(self, x: torch.Tensor, residual: torch.Tensor | None) -> Normed:
        is_fused = self.is_fused and self.weight.dtype == x.dtype
        if not (is_fused or self.has_norm):
            return self.forward_native(x, residual)
        if residual is not None:
            x = x + residual
        norm = torch_npu.npu_gemma_rms_norm if is_fused else torch_npu.npu_rms_norm
        weight = self.weight if is_fused else self.weight.float() + 1
        normed = norm(x.contiguous(), weight, self.variance_epsilon)[0]
        return normed if residual is None else (normed, x)
