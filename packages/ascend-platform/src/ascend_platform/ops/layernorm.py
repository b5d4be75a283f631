# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""RMSNorm on fused NPU operators, registered by ``CustomOp.register_oot`` on import.

Shapes, dtypes and limits of the operators are those of ``torch_npu/_op_plugin_docs.py`` in the
torch_npu wheel.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.layernorm import RMSNorm, RMSNormGated

from ascend_platform import host

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The result, and the sum with a residual if there is one."""


class BiasedNorm(torch.nn.Module):
    """A norm that adds a bias in ModelSlim checkpoints whose outliers are shifted."""

    bias: torch.nn.Parameter | None

    def make_bias(self, weight: torch.Tensor | None) -> None:
        """Make the parameter, like ``weight``, if the checkpoint being loaded has biases of norms."""
        config, bias = get_current_vllm_config_or_none(), None
        has_biases = config and getattr(config.quant_config, "norm_biases", False)
        if weight is not None and has_biases:
            bias = torch.nn.Parameter(torch.zeros_like(weight), requires_grad=False)
        self.register_parameter("bias", bias)

    def with_bias(self, made: Normed) -> Normed:
        """``made``, of the same dtype, with the bias added to the result."""
        if self.bias is None:
            return made
        return (made[0] + self.bias, made[1]) if isinstance(made, tuple) else made + self.bias


@RMSNorm.register_oot
class NPURMSNorm(RMSNorm, BiasedNorm):
    """RMSNorm by npu_rms_norm and npu_add_rms_norm, for a weight of the input's dtype and the whole
    last dimension."""

    quantizing: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None
    """With a residual, in the place of npu_add_rms_norm (``ops/norm_quant.py``), or None."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        lacking = host.chip_family().lacks("npu_rms_norm", "npu_add_rms_norm")
        self.quantizing = None
        self.is_fused = not lacking and self.has_weight and self.variance_size_override is None
        self.make_bias(self.weight if self.has_weight else None)

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """``rms_norm(x)``; with a residual of x, that of ``x + residual``, and the sum. All ``[...,
        hidden]``."""
        return self.with_bias(self._without_bias(x, residual))

    def _without_bias(self, x: torch.Tensor, residual: torch.Tensor | None) -> Normed:
        weight = self.weight
        if not self.is_fused or x.dtype != weight.dtype:
            return self.forward_native(x, residual)
        if residual is None:
            return torch_npu.npu_rms_norm(x, weight, self.variance_epsilon)[0]
        if self.quantizing is not None and x.dim() == 2:
            return self.quantizing(x, residual)
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, self.variance_epsilon)
        return normed, total


@RMSNormGated.register_oot
class NPURMSNormGated(RMSNormGated):
    """``rms_norm(x) * silu(z)``, the norm of linear attention, by npu_rms_norm and npu_swiglu.

    The norm is rounded to x's dtype before it is multiplied, as in transformers. vLLM
    computes other forms in PyTorch.
    """

    def forward_oot(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """x and z ``[..., hidden]`` of one dtype."""
        is_silu = self.norm_before_gate and self.activation in ("silu", "swish")
        is_silu = is_silu and self.group_size is None
        if z is None or not is_silu or not x.dtype == z.dtype == self.weight.dtype:
            return self.forward_native(x, z)
        normed = torch_npu.npu_rms_norm(x, self.weight, self.eps)[0]
        if x.dim() < 3:
            return torch_npu.npu_swiglu(torch.cat((z, normed), -1))
        # One row for all heads: the operator's time is a matter of rows.
        both = torch.cat((z.flatten(-2), normed.flatten(-2)), -1)
        return torch_npu.npu_swiglu(both).view(x.shape)
