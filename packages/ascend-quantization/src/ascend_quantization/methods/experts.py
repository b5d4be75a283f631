# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantized experts of any checkpoint format: loaded by vLLM's expert loader, applied by
a scheme."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from ascend_platform.extension import NPUExperts, RefusedError, with_adapters
from vllm.model_executor.layers.fused_moe import (
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
    RoutedExperts,
)
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.utils import set_weight_attrs

from ascend_quantization.base import Layout, Quantized, Scheme, Stored, Tensors
from ascend_quantization.methods.linear import as_bytes, replace
from ascend_quantization.schemes import SCHEMES


def matrices_of(layer: Any, prefix: str, fused: Mapping[str, list[str]]) -> list[str]:
    """The checkpoint's names of the matrices that vLLM fuses into a layer, or of the first
    expert."""
    last = prefix.rpartition(".")[2]
    path, parts = prefix.removesuffix(last), fused.get(last, [last])
    if isinstance(layer, RoutedExperts):
        names = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
        path, parts = f"{prefix}.0.", [str(name) for name in names]
    return [f"{path}{part}" for part in parts]


def register(
    layer: torch.nn.Module, name: str, data: torch.Tensor, attributes: dict[str, Any]
) -> None:
    """Register a parameter that is loaded and not trained, with the attributes that vLLM's weight
    loaders read."""
    parameter = torch.nn.Parameter(data, requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, attributes)


class CheckpointExperts:
    """Mixin for quantization methods of experts whose weights have another form in the checkpoint:
    registers parameters for vLLM's expert loader, ``w13_<name>`` and ``w2_<name>``."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the tensors of :meth:`tensors`; ``params_dtype`` is the dtype of the layer's
        inputs and outputs."""
        self.dtype, inner = params_dtype, intermediate_size_per_partition
        for prefix, rows, inputs in (
            ("w13_", (inner, inner), hidden_size),
            ("w2_", (hidden_size,), inner),
        ):
            for name, data, own in self.tensors(num_experts, rows, inputs):
                attributes = dict(extra_weight_attrs)
                if convert := own.pop("convert", None):
                    attributes["weight_loader"] = loading(attributes["weight_loader"], convert)
                register(layer, prefix + name, data, attributes | own)

    def tensors(
        self, num_experts: int, rows: tuple[int, ...], inputs: int
    ) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Name, memory and loaders' attributes of each tensor of the experts' first or second
        matrices.

        Args:
            rows: of this rank's gate and up matrices, or of its down matrix.
            inputs: columns on this rank.

        Returns:
            An attribute ``convert`` is a function of a checkpoint's tensor, called before the
            loader.
        """
        raise NotImplementedError


def loading(
    loader: Callable[..., Any], convert: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    """The weight loader, for tensors that are converted first."""

    @functools.wraps(loader)
    def load(
        param: torch.nn.Parameter, loaded_weight: torch.Tensor, *arguments: Any, **named: Any
    ) -> Any:
        return loader(param, convert(loaded_weight), *arguments, **named)

    return load


class QuantizedExperts(CheckpointExperts, NPUExperts, FusedMoEMethodBase):
    """Quantization method of one layer's experts. Tokens are quantized as they are dispatched, if
    the scheme takes int8 rows.

    Args:
        stored: the tensors of an expert's matrix, which vLLM loads into ``w13_<name>`` and
            ``w2_<name>``.
        read: converts these tensors to a matrix.
        group_size: inputs per scale; 0 or -1 for one scale per channel.
        name: of the layer, for errors.
    """

    def __init__(
        self,
        moe: FusedMoEConfig,
        scheme: Scheme,
        stored: dict[str, Stored],
        read: Callable[[Tensors], Quantized],
        group_size: int,
        name: str,
    ) -> None:
        super().__init__(moe)
        if not scheme.experts:
            raise RefusedError(
                f"{name} has experts of {scheme.name}; supported for experts:"
                f" {', '.join(each.name for each in SCHEMES.values() if each.experts)}; fix:"
                " quantize them again as one of these"
            )
        self.scheme, self.stored, self.read = scheme, stored, read
        self.group_size, self.name = group_size, name

    def tensors(
        self, num_experts: int, rows: tuple[int, ...], inputs: int
    ) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        self.scheme.check_size(sum(rows), inputs, self.name)
        groups = self.scheme.count_groups(inputs, self.group_size, True, self.name)
        for name, stored in self.stored.items():
            shape = stored.shape(sum(rows), inputs, groups)
            # A rank may have a single group.
            several = stored.layout == Layout.GROUPS and self.group_size > 0
            kind = "GROUP" if several else "CHANNEL"
            if stored.layout == Layout.INPUT:  # One for each matrix of w13.
                kind, shape = "TENSOR", (len(rows),)
            data = torch.zeros(num_experts, *shape, dtype=stored.dtype)
            method = FusedMoeWeightScaleSupported[kind].value
            about: dict[str, Any] = {"quant_method": method, "is_transposed": stored.transposed}
            if stored.dtype == torch.uint8:
                about["convert"] = as_bytes
            yield name, data, about

    def process_weights_after_loading(self, layer: Any) -> None:
        for prefix in ("w13_", "w2_"):
            given = {name: getattr(layer, prefix + name).data for name in self.stored}
            matrix = self.scheme.checked(self.read(given), self.name)
            pack = self.scheme.pack_down if prefix == "w2_" else self.scheme.pack
            replace(layer, self.stored, pack(matrix, self.dtype), prefix)
        self.setup_experts(layer)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's own kernels, which need one, are not used."""

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        experts = SchemeExperts(
            self.scheme,
            self.packed(layer, "w13_"),
            self.packed(layer, "w2_"),
            x.dtype,
            self.activation_of(layer) if self.takes_biases else None,
        )
        return self.apply_routed(experts, x, topk_weights, topk_ids)

    def packed(self, layer: Any, prefix: str) -> Tensors:
        """The tensors of the scheme, and the biases, of the first or second matrices."""
        names = (*self.scheme.packed, *["bias"] * self.moe.has_bias)
        return {name: getattr(layer, prefix + name) for name in names}


@dataclass(frozen=True)
class SchemeExperts:
    """One layer's experts; see ``protocols.Experts``. ``activation`` is None for SwiGLU without a
    limit."""

    scheme: Scheme
    first: Tensors
    second: Tensors
    dtype: torch.dtype
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None
    lora: Any = None

    @property
    def takes_int8(self) -> bool:
        return self.scheme.int8_rows

    def __call__(
        self, rows: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.lora is None and self.activation is None:
            return self.scheme.swiglu(self.first, self.second, rows, counts, scale, self.dtype)
        return with_adapters(
            lambda rows: self.scheme.grouped(rows, self.first, counts),
            self.activation or torch_npu.npu_swiglu,
            lambda inner: self.scheme.grouped(inner, self.second, counts),
            rows,
            counts,
            self.lora,
        )
