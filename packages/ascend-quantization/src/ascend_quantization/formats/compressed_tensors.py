# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""compressed-tensors checkpoints: vLLM's configuration, with kernels for linear layers from vLLM's
kernel registry.

The registry does not cover experts (``vllm/model_executor/layers/fused_moe/oracle``): for them the
configuration is subclassed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ascend_platform.extension import RefusedError
from compressed_tensors.quantization import QuantizationArgs
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.mxfp4.base import (
    MxFp4LinearKernel,
    MxFp4LinearLayerConfig,
)
from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import (
    Mxfp8LinearKernel,
    Mxfp8LinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

from ascend_quantization.base import (
    GROUP_STEP,
    MOST,
    Layout,
    Quantized,
    Scheme,
    Stored,
    Tensors,
    unpack_words,
)
from ascend_quantization.common import FP8, check_chip, fp8_target, not_quantized
from ascend_quantization.formats.fp8 import method_of
from ascend_quantization.methods.experts import QuantizedExperts, matrices_of
from ascend_quantization.methods.fp8 import Fp8Format
from ascend_quantization.methods.linear import (
    ModelSlimLinearMethod,
    apply,
    check_absorbed,
    replace,
)
from ascend_quantization.schemes import SCHEMES
from ascend_quantization.schemes.floats import GROUP
from ascend_quantization.schemes.w8a8 import W8A8

PACKED, BYTES = FORMS = "pack-quantized", "int-quantized"
STATIC = "W8A8"
OFFLINE = {"weight_input", "weight_output"}
"""Locations of transforms that the stored weights include."""
UNUSED = WeightsMapper(orig_to_new_suffix={".weight_shape": None})
SUPPORTED = (
    "supported: int8 and int4 weights, per channel or per group, with unquantized inputs"
    f" ({PACKED}), dynamic symmetric per-token int8 inputs or, with int8 weights ({BYTES}), static"
    " per-tensor int8 inputs; FP8 weights, per tensor, channel or block, without static inputs;"
    " MXFP8 and MXFP4 weights (groups of 32) with dynamic inputs of these formats"
)


def fp8_form(weights: QuantizationArgs | None) -> Fp8Format | None:
    """The storage of FP8 weights, whose inputs are not FP8 here; None for other weights."""
    if (
        weights is None
        or weights.type != "float"
        or weights.num_bits != 8
        or weights.dynamic
        or not weights.symmetric
    ):
        return None
    if weights.strategy == "block" and weights.block_structure:
        return Fp8Format("weight_scale", (weights.block_structure[0], weights.block_structure[1]))
    blocks = {"tensor": (0, 0), "channel": (1, 0)}
    return (
        Fp8Format("weight_scale", blocks[weights.strategy]) if weights.strategy in blocks else None
    )


def is_mx(weights: QuantizationArgs) -> bool:
    """Whether weights are in e4m3 or e2m1, with an exponent for 32 inputs."""
    return bool(
        weights.type == "float"
        and weights.num_bits in (4, 8)
        and (weights.strategy, weights.group_size) == ("group", GROUP)
        and weights.symmetric
        and not weights.dynamic
        and (weights.num_bits == 4 or weights.scale_dtype == torch.uint8)
    )


def scheme_of(weights: QuantizationArgs, inputs: QuantizationArgs | None, form: str | None) -> str:
    """The scheme's name for a group of a compressed-tensors configuration.

    Raises:
        RefusedError: it is not supported.
    """
    bits, kind = weights.num_bits, None
    if fp8_form(weights) and (inputs is None or inputs.dynamic):
        return FP8
    if is_mx(weights) and (inputs is None or (inputs.type == "float" and inputs.dynamic)):
        # vLLM's class for MXFP8 quantizes inputs in any case.
        kind = {
            (8, 0): "W8A8_MXFP8",
            (8, 8): "W8A8_MXFP8",
            (4, 0): "W4A16_MXFP4",
            (4, 4): "W4A4_MXFP4",
            (4, 8): "W4A8_MXFP",
        }.get((bits, inputs.num_bits if inputs else 0))
    rows = weights.strategy in ("channel", "group") or (bits == 8 and weights.strategy == "tensor")
    if weights.type == "int" and bits in (4, 8) and rows and not weights.dynamic:
        if inputs is None:
            kind = f"W{bits}A16" if form == PACKED and weights.strategy != "tensor" else None
        elif (inputs.type, inputs.num_bits) == ("int", 8) and weights.symmetric and form in FORMS:
            if inputs.dynamic and inputs.strategy == "token" and inputs.symmetric:
                kind = f"W{bits}A8_DYNAMIC"
            elif not inputs.dynamic and inputs.strategy == "tensor" and bits == 8 and form == BYTES:
                kind = STATIC
    if kind is None:
        found = f"{weights.num_bits}-bit {weights.type} weights ({weights.strategy})"
        asked = "unquantized inputs"
        if inputs:
            asked = f"{inputs.num_bits}-bit {inputs.type} inputs ({inputs.strategy})"
        raise RefusedError(
            f"compressed-tensors asks for {found} with {asked} in format {form}; {SUPPORTED}; fix:"
            " quantize the model again"
        )
    return kind


@register_quantization_config("compressed-tensors")
class NPUCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's configuration, with experts on grouped matrix multiplications."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        # From --quantization, for a checkpoint without such a configuration.
        if not arguments and not named:
            raise not_quantized("compressed-tensors", "this model")
        super().__init__(*arguments, **named)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:  # vLLM's has no self
        return [torch.bfloat16, torch.float16]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsConfig:
        """As in vLLM.

        Raises:
            RefusedError: what is not supported.
        """
        made = super().from_config(config)
        transforms = made.transform_config.config_groups if made.transform_config else {}
        places = {args.location for each in transforms.values() for args in each.apply}
        found = [f"transforms of {place} (transform_config)" for place in sorted(places - OFFLINE)]
        groups = config.get("config_groups", {}).values()
        if any(group.get("output_activations") for group in groups):
            found.append("quantized outputs (output_activations)")
        if config.get("kv_cache_scheme"):
            found.append("a quantized KV cache (kv_cache_scheme)")
        if found:
            raise RefusedError(
                f"compressed-tensors asks for {', '.join(found)}; supported: quantized weights and"
                " inputs; fix: quantize the model again without"
            )
        kinds = set()
        for scheme in made.target_scheme_map.values():
            form = scheme.get("format") or made.quant_format
            kinds.add(scheme_of(scheme["weights"], scheme["input_activations"], form))
        check_chip(kinds - {FP8})
        return made

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        return CompressedTensorsConfig.get_checkpoint_weight_mapper() | UNUSED

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase | RoutedExperts):
            return None if isinstance(layer, Attention) else super().get_quant_method(layer, prefix)
        self._add_fused_moe_to_target_scheme_map()
        names = matrices_of(layer, prefix, self.packed_modules_mapping)
        schemes = [self.get_scheme_dict(layer, name) for name in names]
        if any(each != schemes[0] for each in schemes):
            raise RefusedError(
                f"the matrices of {prefix} have different schemes; fix: quantize them alike"
            )
        own: Any = layer
        is_linear = isinstance(layer, LinearBase)  # Rules may be for vLLM's name of it.
        found = self.get_scheme_dict(layer, prefix) if is_linear else schemes[0]
        weights: Any = found and found["weights"]
        inputs: Any = found and found.get("input_activations")
        if fp8 := fp8_form(weights):
            is_weight_only = inputs is None and fp8_target() == "native"
            return method_of(layer, fp8, prefix, "dequantize" if is_weight_only else None)
        if found is None and not is_linear:
            return UnquantizedFusedMoEMethod(own.moe_config)
        if found is None:
            return super().get_quant_method(layer, prefix)
        form = str(found.get("format") or self.quant_format)
        scheme = SCHEMES[scheme_of(weights, inputs, form)]
        if is_linear and scheme.name == "W4A16_MXFP4":
            # vLLM's class quantizes inputs in any case.
            return ModelSlimLinearMethod(scheme, tensors_of(weights, form), prefix)
        if is_linear:
            check_absorbed(scheme.name, prefix)
            return super().get_quant_method(layer, prefix)
        stored = tensors_of(weights, form)
        read = scheme.read if is_mx(weights) else reader(scheme.bits)
        size = weights.group_size or 0
        return QuantizedExperts(own.moe_config, scheme, stored, read, size, prefix)


def tensors_of(weights: QuantizationArgs, form: str) -> dict[str, Stored]:
    """The tensors of a matrix in a checkpoint (``compressed_tensors_moe_wna16.py``,
    ``_w4a8_int8.py``, ``_w8a8_int8.py``)."""
    if is_mx(weights):
        name = "weight_packed" if weights.num_bits == 4 else "weight"
        weight = Stored(torch.uint8, columns=8 // weights.num_bits)
        return {name: weight, "weight_scale": Stored(torch.uint8, Layout.GROUPS)}
    layout = Layout.INPUT if weights.strategy == "tensor" else Layout.GROUPS
    scale = {"weight_scale": Stored(torch.float32, layout)}
    if form == BYTES:
        return {"weight": Stored(torch.int8)} | scale
    each = 32 // weights.num_bits
    packed = {"weight_packed": Stored(torch.int32, columns=each)} | scale
    if not weights.symmetric:
        packed["weight_zero_point"] = Stored(torch.int32, Layout.GROUPS, rows=each)
    return packed


def reader(bits: int) -> Callable[[Tensors], Quantized]:
    def read(given: Tensors) -> Quantized:
        packed, zero = given.get("weight_packed"), given.get("weight_zero_point")
        weight = given["weight"] if packed is None else unpack_words(packed, bits)
        zero_point = None if zero is None else unpack_words(zero, bits, -2).float()
        scale = given["weight_scale"].float()
        if scale.dim() < weight.dim():  # One for each matrix of an expert.
            scale = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1).unsqueeze(-1)
        return Quantized(weight, scale, zero_point)

    return read


class NPUInt8Kernel(Int8ScaledMMLinearKernel):
    """W8A8 and W8A8_DYNAMIC for vLLM's ``CompressedTensorsW8A8Int8``."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if c.is_static_input_scheme or c.input_symmetric:
            return True, None
        return False, "supports dynamic input quantization with symmetric scales only"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        names = self.layer_param_names
        weight, scale, input_scale, zero, _ = self._get_layer_params(layer)
        SCHEMES[STATIC].check_size(weight.shape[0], weight.shape[1], type(self).__name__)
        scale = scale.data.float()
        if not self.config.is_channelwise:  # One per matrix of a fused layer.
            widths = torch.tensor(layer.logical_widths, device=scale.device)
            scale = scale.flatten().repeat_interleave(widths)
        scale = scale.view(-1, 1)
        if self.config.is_static_input_scheme:
            assert input_scale is not None
            self.scheme: Scheme = SCHEMES[STATIC]
            offset = torch.zeros_like(input_scale.data)
            if zero is not None:
                offset = zero.data.to(offset.dtype)
            bias = (-offset * weight.data.sum(1, dtype=torch.float32)).round().to(torch.int32)
            assert isinstance(self.scheme, W8A8)
            inputs = (input_scale.data, offset, torch.get_default_dtype())
            packed = self.scheme.pack_static(
                weight.data, (scale * input_scale.data).flatten(), bias, *inputs
            )
        else:
            self.scheme = SCHEMES["W8A8_DYNAMIC"]
            packed = self.scheme.pack(Quantized(weight.data, scale), torch.get_default_dtype())
        replace(layer, names, packed)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return apply(self.scheme, layer, x, bias)


class NPUMxfp8Kernel(Mxfp8LinearKernel):
    """W8A8_MXFP8 for vLLM's linear layers of compressed-tensors, ModelOpt and ``--quantization
    mxfp8``."""

    scheme: Scheme = SCHEMES["W8A8_MXFP8"]

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Mxfp8LinearLayerConfig) -> tuple[bool, str | None]:
        if max(c.weight_shape) > MOST:
            return False, f"supports up to {MOST} inputs and outputs, not {c.weight_shape}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pack_mx(self.scheme, layer)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return apply(self.scheme, layer, x, bias)


class NPUMxfp4Kernel(MxFp4LinearKernel):
    """W4A8_MXFP and W4A4_MXFP4 for vLLM's ``CompressedTensorsW4A8Mxfp4`` and ``W4A4Mxfp4``."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: MxFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return config.activation_quant_key is not None, "supports quantized inputs only"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        four = self.config.activation_quant_key == kMxfp4Dynamic
        self.scheme = SCHEMES["W4A4_MXFP4" if four else "W4A8_MXFP"]
        pack_mx(self.scheme, layer)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return apply(self.scheme, layer, x, bias)


def pack_mx(scheme: Scheme, layer: torch.nn.Module) -> None:
    """Replace ``weight`` and ``weight_scale`` of a layer by the tensors of the operators."""
    given = (getattr(layer, name).data.view(torch.uint8) for name in scheme.packed)
    matrix = scheme.checked(Quantized(*given), getattr(layer, "prefix", type(layer).__name__))
    replace(layer, scheme.packed, scheme.pack(matrix, torch.get_default_dtype()))


class NPUMixedPrecisionKernel(MPLinearKernel):
    """W8A16, W4A16 and W4A8_DYNAMIC for vLLM's ``CompressedTensorsWNA16``, ``WNA8Int`` and
    ``W4A8Int``."""

    FOUR_BITS = (scalar_types.int4, scalar_types.uint4b8, scalar_types.uint4)
    TYPES = (*FOUR_BITS, scalar_types.uint8b128, scalar_types.uint8)

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        inputs, out = c.partition_weight_shape
        if c.weight_type not in cls.TYPES or c.act_type not in (torch.float16, torch.bfloat16):
            return False, f"does not support {c.weight_type} weights with {c.act_type} inputs"
        several = c.group_size not in (-1, inputs, c.full_weight_shape[0])
        if several and (c.group_size % GROUP_STEP or inputs % c.group_size):
            groups = f"groups of multiples of {GROUP_STEP} that divide the {inputs} inputs"
            return False, f"supports {groups}, not {c.group_size}"
        if max(inputs, out) > MOST:
            return False, f"supports up to {MOST} inputs and outputs, not {inputs} and {out}"
        if c.weight_type.size_bits == 4 and out % 8:
            return False, f"supports four-bit weights with multiples of 8 outputs, not {out}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        kind, bits = self.config.weight_type, self.config.weight_type.size_bits
        # vLLM tells a kernel about quantized inputs only this way (compressed_tensors_wNa8.py).
        of_inputs = getattr(layer, "_humming_input_quant_config", None)
        quantized = kind == scalar_types.int4 or of_inputs is not None
        self.scheme = SCHEMES[f"W{bits}A8_DYNAMIC" if quantized else f"W{bits}A16"]
        weight, scale, zero = self._get_weight_params(layer)
        given = {"weight_scale": scale.data}
        given["weight" if kind == scalar_types.int4 else "weight_packed"] = weight.data
        if zero is not None:
            given["weight_zero_point"] = zero.data
        matrix = self.scheme.checked(reader(bits)(given), type(self).__name__)
        packed = self.scheme.pack(matrix, self.config.act_type)
        zero_name = self.w_zp_name or "weight_zero_point"
        replace(layer, {"weight", "weight_shape", self.w_q_name, self.w_s_name, zero_name}, packed)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return apply(self.scheme, layer, x, bias)


register_linear_kernel(NPUInt8Kernel, PlatformEnum.OOT, "int8")
register_linear_kernel(NPUMixedPrecisionKernel, PlatformEnum.OOT, "mp")
register_linear_kernel(NPUMxfp8Kernel, PlatformEnum.OOT, "mxfp8")
register_linear_kernel(NPUMxfp4Kernel, PlatformEnum.OOT, "mxfp4")
