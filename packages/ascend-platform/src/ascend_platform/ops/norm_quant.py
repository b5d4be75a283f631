# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""RMSNorm, or SwiGLU, and the dynamic quantization of the linear layer that reads it, as one
operator, where the model is not compiled.

They are those whose result vLLM's decoder layers give to one linear layer. Another reader
gets the result in the model's dtype, and ends the fusion for its norm or activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch_npu

from ascend_platform.ops.activation import LEAST_QUANTIZED, NPUSiluAndMul
from ascend_platform.ops.deferred import DeferredTensor
from ascend_platform.ops.layernorm import NPURMSNorm

READERS = (
    ("input_layernorm", "self_attn.qkv_proj"),
    ("input_layernorm", "self_attn.fused_qkv_a_proj"),
    ("post_attention_layernorm", "mlp.gate_up_proj"),
    ("act_fn", "down_proj"),
)
"""Norms and activations, and the linear layers that read them, by their names in vLLM's models."""

_SHAPE: Any = torch.Tensor.shape
_SIZES = (_SHAPE.__get__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.__len__)


class Rows(NamedTuple):
    """int8 ``[rows, hidden]`` with a float32 scale for each row."""

    values: torch.Tensor
    scale: torch.Tensor


class QuantizedRows(DeferredTensor):
    """A result as :class:`Rows`; any function of torch gets it in the model's dtype."""

    rows: Rows
    restore: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], arguments: Any = (), named: Any = None
    ) -> Any:
        if function in _SIZES:  # The int8 values have the sizes of the result.
            return super(DeferredTensor, cls).__torch_function__(function, types, arguments, named)
        return super().__torch_function__(function, types, arguments, named)

    def computed(self) -> torch.Tensor:
        restored: torch.Tensor = self.__dict__["restore"]()
        return restored


class NormOfRows:
    """npu_add_rms_norm_dynamic_quant in the place of a norm's npu_add_rms_norm."""

    def __init__(self, norm: NPURMSNorm) -> None:
        self.norm = norm

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight, epsilon = self.norm.weight, self.norm.variance_epsilon
        values, _, total, scale, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
            x, residual, weight, epsilon=epsilon, output_mask=[True, False]
        )

        def restore() -> torch.Tensor:
            self.norm.quantizing = None
            return torch_npu.npu_rms_norm(total, weight, epsilon)[0]

        return quantized(values, scale, restore), total


class SwigluOfRows:
    """npu_dequant_swiglu_quant in the place of an activation's npu_swiglu."""

    def __init__(self, activation: NPUSiluAndMul) -> None:
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] < 2 * LEAST_QUANTIZED:
            self.activation.quantizing = None
            return torch_npu.npu_swiglu(x)
        values, scale = torch_npu.npu_dequant_swiglu_quant(x, activate_left=True, quant_mode=1)

        def restore() -> torch.Tensor:
            self.activation.quantizing = None
            return torch_npu.npu_swiglu(x)

        return quantized(values, scale, restore)


def quantized(
    values: torch.Tensor, scale: torch.Tensor, restore: Callable[[], torch.Tensor]
) -> torch.Tensor:
    rows = values.as_subclass(QuantizedRows)
    rows.__dict__.update(rows=Rows(values, scale), restore=restore)
    return rows


def quantized_rows(x: torch.Tensor) -> Rows | None:
    """The quantized rows of a norm's or activation's result; None of another tensor."""
    return x.__dict__["rows"] if type(x) is QuantizedRows else None


def install(model: torch.nn.Module) -> int:
    """Fuse a model's norms and activations with the layers of W8A8_DYNAMIC that read them; returns
    how many."""
    count = 0
    for layer in model.modules():
        for name, path in READERS:
            source, reader = getattr(layer, name, None), _submodule(layer, path)
            if not takes_rows(reader):
                continue
            if isinstance(source, NPURMSNorm) and source.is_fused and source.bias is None:
                source.quantizing, count = NormOfRows(source), count + 1
            elif isinstance(source, NPUSiluAndMul):
                source.quantizing, count = SwigluOfRows(source), count + 1
    return count


def _submodule(layer: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return layer.get_submodule(path)
    except AttributeError:
        return None


def takes_rows(reader: Any) -> bool:
    """Whether a linear layer, of a checkpoint of ModelSlim or compressed-tensors, multiplies int8
    rows with a scale each by int8 weights: ``weight`` ``[in, out]``, ``weight_scale`` float32
    ``[out]``."""
    kernel = getattr(getattr(reader, "scheme", None), "kernel", None)
    method = kernel or getattr(reader, "quant_method", None)
    return getattr(getattr(method, "scheme", None), "takes_rows", False)
