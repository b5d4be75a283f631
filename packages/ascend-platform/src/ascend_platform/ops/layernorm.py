"""RMSNorm on fused NPU operators, registered on import as implementations of vLLM's IR (``vllm/ir/op.py``) and as a layer.

Shapes, dtypes and limits of the operators are those of ``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel.
"""

from typing import Any

import torch
import torch_npu
from vllm import ir
from vllm.model_executor.layers.layernorm import RMSNorm, RMSNormGated


def _is_supported(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    """Whether npu_rms_norm supports the arguments: a weight of the input's dtype, and the whole last dimension."""
    return weight is not None and weight.dtype == x.dtype and variance_size is None


@ir.ops.rms_norm.register_impl(
    "npu", supports_args=lambda x, weight, epsilon, variance_size=None: _is_supported(x, weight, variance_size)
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension; x ``[..., hidden]``, weight ``[hidden]``."""
    return torch_npu.npu_rms_norm(x, weight, epsilon)[0]


@ir.ops.fused_add_rms_norm.register_impl(
    "npu", supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: _is_supported(x, weight, variance_size)
)
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + x_residual), x + x_residual)``; both inputs ``[..., hidden]`` of one dtype."""
    normed, _, total = torch_npu.npu_add_rms_norm(x, x_residual, weight, epsilon)
    return normed, total


@RMSNorm.register_oot
class NPURMSNorm(RMSNorm):
    """vLLM's layer, which calls the operators where the IR would choose them: its dispatch takes half as long as a launch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = all(op.get_priority()[:1] == ["npu"] for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm))
        self.is_fused = chosen and self.has_weight and self.variance_size_override is None

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``rms_norm(x)``; with a residual of x, that of ``x + residual``, and the sum. All ``[..., hidden]``."""
        weight = self.weight
        if not self.is_fused or x.dtype != weight.dtype:
            return self.forward_native(x, residual)
        if residual is None:
            return torch_npu.npu_rms_norm(x, weight, self.variance_epsilon)[0]
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, self.variance_epsilon)
        return normed, total


@RMSNormGated.register_oot
class NPURMSNormGated(RMSNormGated):
    """``rms_norm(x) * silu(z)``, the norm of linear attention, by npu_rms_norm and npu_swiglu.

    The norm is rounded to x's dtype before it is multiplied, as in transformers. Other forms are vLLM's in PyTorch.
    """

    def forward_oot(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """x and z ``[..., hidden]`` of one dtype."""
        is_silu = self.norm_before_gate and self.group_size is None and self.activation in ("silu", "swish")
        if z is None or not is_silu or not x.dtype == z.dtype == self.weight.dtype:
            return self.forward_native(x, z)
        return torch_npu.npu_swiglu(torch.cat((z, torch_npu.npu_rms_norm(x, self.weight, self.eps)[0]), -1))
