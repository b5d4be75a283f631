# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Activations on fused NPU operators, registered by ``CustomOp.register_oot`` on import: SwiGLU,
GeGLU and forms of GELU.

Shapes, dtypes and limits of the operators are those of ``torch_npu/_op_plugin_docs.py`` in the
torch_npu wheel.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_npu
from vllm.model_executor.layers.activation import (
    FastGELU,
    GeluAndMul,
    NewGELU,
    QuickGELU,
    SiluAndMul,
)

LEAST_QUANTIZED = 512
"""Columns of SwiGLU's result from which on npu_dequant_swiglu_quant quantizes it. vllm-ascend's copy
of the kernel overran a buffer with 96, 128 and 192 columns (pull requests 12424 and 12965)."""


@SiluAndMul.register_oot
class NPUSiluAndMul(SiluAndMul):
    """``silu(x[..., :d]) * x[..., d:]`` by npu_swiglu; x ``[..., 2 d]`` of float32, float16 or
    bfloat16."""

    quantizing: Callable[[torch.Tensor], torch.Tensor] | None = None
    """In the place of npu_swiglu for bfloat16 (``ops/norm_quant.py``), or None."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self.quantizing is not None and x.dim() == 2 and x.dtype == torch.bfloat16:
            return self.quantizing(x)
        return torch_npu.npu_swiglu(x)


@GeluAndMul.register_oot
class NPUGeluAndMul(GeluAndMul):
    """``gelu(x[..., :d]) * x[..., d:]`` by npu_geglu; npu_gelu_mul, which has one output, is
    limited to ``2 d <= 1024``."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        approximate = int(self.approximate == "tanh")
        return torch_npu.npu_geglu(x, approximate=approximate, activate_left=True)[0]


class NPUTanhGELUMixin:
    """GELU's tanh approximation by PyTorch's operator; vLLM's layer writes the formula out."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")


@NewGELU.register_oot
class NPUNewGELU(NPUTanhGELUMixin, NewGELU):
    """GELU of GPT-2 and others."""


@FastGELU.register_oot
class NPUFastGELU(NPUTanhGELUMixin, FastGELU):
    """The same approximation with its factors in another order."""


@QuickGELU.register_oot
class NPUQuickGELU(QuickGELU):
    """``x * sigmoid(1.702 x)`` by npu_fast_gelu."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return torch_npu.npu_fast_gelu(x)
