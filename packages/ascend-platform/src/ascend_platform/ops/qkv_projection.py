# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Queries, keys and values as a tensor each, by one npu_grouped_matmul, where the model is not
compiled.

Slices of one wide output are not contiguous, and npu_scatter_pa_kv_cache takes contiguous values
only: they would be copied in each layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_npu
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod

from ascend_platform.ops.deferred import DeferredTensor

Apply = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Parts(DeferredTensor):
    """Outputs ``[tokens, part]``, which ``split`` returns. Any other function of torch gets one
    tensor, and ends the separation for its layer."""

    parts: tuple[torch.Tensor, ...]
    layer: Any

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], arguments: Any = (), named: Any = None
    ) -> Any:
        if function is torch.Tensor.split and named == {"dim": -1}:
            parts = arguments[0].__dict__["parts"]
            if [part.shape[-1] for part in parts] == list(arguments[1]):
                return parts
        return super().__torch_function__(function, types, arguments, named)

    def computed(self) -> torch.Tensor:
        state = self.__dict__
        if len(state["parts"]) > 1:
            state["parts"] = (torch.cat(state["parts"], -1),)
            vars(state["layer"].quant_method).pop("apply", None)
        joined: torch.Tensor = state["parts"][0]
        return joined


def install(model: torch.nn.Module) -> int:
    """Separate the unquantized projections of a model's attention layers; returns how many."""
    layers: list[Any] = [
        each.qkv_proj
        for each in model.modules()
        if isinstance(getattr(each, "attn", None), Attention)
        and _is_plain(getattr(each, "qkv_proj", None))
    ]
    for layer in layers:
        layer.quant_method.apply = functools.partial(apply, layer.quant_method.apply)
    return len(layers)


def _is_plain(layer: Any) -> bool:
    """npu_grouped_matmul takes float32 biases with bfloat16 weights, unlike those of models."""
    return (
        type(layer) is QKVParallelLinear
        and type(layer.quant_method) is UnquantizedLinearMethod
        and layer.bias is None
        and layer.weight.dtype in (torch.bfloat16, torch.float16)
    )


def apply(
    whole: Apply, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x ``[tokens, in]``, by ``whole`` if it is one token, whose slices are contiguous."""
    if x.dim() != 2 or len(x) == 1:
        return whole(layer, x, bias)
    query, key = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    weight = layer.weight.data
    weights = weight.split([query, key, len(weight) - query - key])
    parts = torch_npu.npu_grouped_matmul(
        [x] * 3, [each.t() for each in weights], split_item=0, group_type=-1
    )
    output = x.new_empty(()).expand(len(x), len(weight)).as_subclass(Parts)
    output.__dict__.update(parts=tuple(parts), layer=layer)
    return output
