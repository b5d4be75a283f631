# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""RMSNorm and the dynamic quantization of the linear layer that reads it, as one operator, where
the model is not compiled.

The norms are those of which vLLM's decoder layers give the result to one linear layer. Another
reader gets the result in the model's dtype, and ends the fusion for its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch_npu
from torch.utils._pytree import tree_map_only

from ascend_platform.ops.layernorm import NPURMSNorm

READERS = {
    "input_layernorm": "self_attn.qkv_proj",
    "post_attention_layernorm": "mlp.gate_up_proj",
}
"""The linear layers that read the norms of a decoder layer, by their names in vLLM's models."""


class Rows(NamedTuple):
    """int8 ``[rows, hidden]`` with a float32 scale for each row."""

    values: torch.Tensor
    scale: torch.Tensor


class QuantizedNorm(torch.Tensor):
    """The result of a norm as :class:`Rows`; any function of torch gets it in the model's dtype."""

    rows: Rows
    restore: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], arguments: Any = (), named: Any = None
    ) -> Any:
        arguments, named = tree_map_only(cls, cls._restored, (arguments, named or {}))
        return function(*arguments, **named)

    def _restored(self) -> torch.Tensor:
        return self.__dict__["restore"]()


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

        normed = values.as_subclass(QuantizedNorm)
        normed.__dict__.update(rows=Rows(values, scale), restore=restore)
        return normed, total


def rows_of(x: torch.Tensor) -> Rows | None:
    """The quantized rows of a norm's result; None of another tensor."""
    return x.__dict__["rows"] if type(x) is QuantizedNorm else None


def install(model: torch.nn.Module) -> int:
    """Fuse the norms of a model's decoder layers with the layers of W8A8_DYNAMIC that read them;
    returns how many."""
    count = 0
    for layer in model.modules():
        for name, path in READERS.items():
            norm, reader = getattr(layer, name, None), _submodule(layer, path)
            if isinstance(norm, NPURMSNorm) and norm.is_fused and _takes_rows(reader):
                norm.quantizing, count = NormOfRows(norm), count + 1
    return count


def _submodule(layer: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return layer.get_submodule(path)
    except AttributeError:
        return None


def _takes_rows(reader: Any) -> bool:
    """Whether a layer multiplies int8 rows, in a checkpoint of ModelSlim or compressed-tensors."""
    kernel = getattr(getattr(reader, "scheme", None), "kernel", None)
    method = kernel or getattr(reader, "quant_method", None)
    return getattr(getattr(method, "scheme", None), "takes_rows", False)
