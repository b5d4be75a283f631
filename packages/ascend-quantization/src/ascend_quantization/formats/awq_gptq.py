# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""AWQ and GPTQ checkpoints: vLLM's configurations, with weights converted at load to those of
schemes W4A16 and W8A16.

Both store the transpose of a matrix: ``scales`` ``[groups, out]``; ``qzeros`` ``[groups, out]``, in
32-bit words along ``out``; ``qweight`` ``[in, out]``, in words along ``out`` (AWQ) or ``in``
(GPTQ). Values are unsigned; a weight is (value - zero) * scale.
"""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import torch
from ascend_platform.extension import RefusedError
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, get_moe_quant_method
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    get_dynamic_override,
    get_linear_quant_method,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.scalar_type import scalar_types

from ascend_quantization.base import (
    Layout,
    Quantized,
    Scheme,
    Stored,
    Tensors,
    unpack_words,
)
from ascend_quantization.common import AWQ, GPTQ, check_chip
from ascend_quantization.methods.experts import QuantizedExperts, matrices_of
from ascend_quantization.methods.linear import TransposedLinearMethod
from ascend_quantization.schemes import SCHEMES

AWQ_SLOTS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Slot of a word's four bits that has each of its eight columns (AutoAWQ, ``WQLinear_GEMM``:
``order_map``, inverted)."""

LM_HEAD = "a quantized output head (lm_head)", "output heads that are not quantized"

ONES = {4: 0x11111111, 8: 0x01010101}
"""1 in each value of a word, by bits: GPTQ's first format stores zeros minus 1."""


def tensors_of(bits: int, *, awq: bool) -> dict[str, Stored]:
    """The tensors of a matrix in a checkpoint."""
    words = functools.partial(Stored, torch.int32, transposed=True)
    each = 32 // bits
    return {
        "qweight": words(rows=each) if awq else words(columns=each),
        "qzeros": words(Layout.GROUPS, rows=each),
        "scales": Stored(torch.float32, Layout.GROUPS, transposed=True),
    }


def read_awq(given: Tensors) -> Quantized:
    """The matrix of AWQ's tensors in the layout of its ``gemm`` kernels, which read the zeros of
    symmetric weights too."""
    weight, zeros = (
        unpack_words(given[name], 4)
        .unflatten(-1, (-1, 8))[..., AWQ_SLOTS]
        .flatten(-2)
        .transpose(-1, -2)
        for name in ("qweight", "qzeros")
    )
    return Quantized(weight, given["scales"].transpose(-1, -2), zeros.float())


def read_gptq(given: Tensors, *, bits: int, symmetric: bool, offset: int) -> Quantized:
    """The matrix of GPTQ's tensors. ``offset`` is added to the words of the zeros, which symmetric
    weights do not need."""
    weight, zeros = unpack_words(given["qweight"], bits, -2).transpose(-1, -2), None
    if not symmetric:
        zeros = unpack_words(given["qzeros"] + offset, bits).transpose(-1, -2).float()
    return Quantized(weight, given["scales"].transpose(-1, -2), zeros)


def refuse(method: str, found: str, supported: str) -> RefusedError:
    return RefusedError(
        f"the {method} checkpoint has {found}; supported: {supported}; fix: use another checkpoint"
    )


@register_quantization_config(AWQ)
class NPUAWQConfig(AutoAWQConfig):
    """vLLM's configuration, with linear layers and experts of scheme W4A16."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AutoAWQConfig:
        """As in vLLM.

        Raises:
            RefusedError: an unsupported chip, layout or number of bits, or a quantized output head.
        """
        bits = cls.get_from_keys(config, ["w_bit", "bits"])
        if bits != 4:
            raise refuse("AWQ", f"{bits}-bit weights", "4 bits")
        if (version := str(config.get("version") or "gemm").lower()) != "gemm":
            raise refuse("AWQ", f"weights in the layout of {version} kernels", "gemm")
        if config.get("lm_head"):
            raise refuse("AWQ", *LM_HEAD)
        check_chip(["W4A16"])
        return super().from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase | RoutedExperts):
            return None
        experts: Any = layer.moe_config if isinstance(layer, RoutedExperts) else None
        fused = {} if experts else self.packed_modules_mapping
        if is_layer_skipped(prefix, self.modules_to_not_convert, fused, match_mode="substring"):
            return UnquantizedFusedMoEMethod(experts) if experts else UnquantizedLinearMethod()
        method = functools.partial(QuantizedExperts, experts) if experts else TransposedLinearMethod
        stored = tensors_of(4, awq=True)
        return method(SCHEMES["W4A16"], stored, read_awq, self.group_size, prefix)


@register_quantization_config(GPTQ)
class NPUGPTQConfig(AutoGPTQConfig):
    """vLLM's configuration, with linear layers and experts of schemes W4A16 and W8A16, symmetric
    and asymmetric.

    vLLM refuses groups in activation order (``desc_act``), and applies the rules for single layers
    (``dynamic``).
    """

    TYPE_MAP = AutoGPTQConfig.TYPE_MAP | {
        (4, False): scalar_types.uint4,
        (8, False): scalar_types.uint8,
    }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AutoGPTQConfig:
        """As in vLLM.

        Raises:
            RefusedError: an unsupported chip, format or number of bits, or a quantized output head.
        """
        bits = config.get("bits")
        if bits not in ONES:
            raise refuse("GPTQ", f"{bits}-bit weights", "4 and 8 bits")
        if (form := config.get("checkpoint_format") or "gptq") not in ("gptq", "gptq_v2"):
            raise refuse("GPTQ", f"weights in format {form} (checkpoint_format)", "gptq, gptq_v2")
        if config.get("lm_head"):
            raise refuse("GPTQ", *LM_HEAD)
        check_chip([f"W{bits}A16"])
        return super().from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        # vLLM looks for a rule by its own name; rules are for the checkpoint's.
        names = matrices_of(layer, prefix, self.packed_modules_mapping)
        plain = {"bits": self.weight_bits, "group_size": self.group_size, "sym": self.is_sym}
        found: list[Any] = [get_dynamic_override(self, name) for name in names]
        rules: list[Any] = [rule if rule is False else plain | (rule or {}) for rule in found]
        if any(rule != rules[0] for rule in rules):
            raise RefusedError(
                f"the GPTQ checkpoint has different rules (dynamic) for {', '.join(names)}, which"
                " vLLM fuses; fix: quantize them alike"
            )
        ruled = copy.copy(self)
        ruled.dynamic = {f"{'+' if rules[0] else '-'}:{re.escape(prefix)}": rules[0] or {}}
        # The helpers apply the rule to a copy of the configuration.
        experts: Any = lambda own, moe: QuantizedExperts(moe, *own.arguments(prefix))  # noqa: E731
        linear: Any = lambda own: TransposedLinearMethod(*own.arguments(prefix))  # noqa: E731
        if isinstance(layer, RoutedExperts):
            return get_moe_quant_method(ruled, layer, prefix, experts)
        return get_linear_quant_method(ruled, layer, prefix, linear)

    def arguments(self, prefix: str) -> tuple[Scheme, dict[str, Stored], Any, int, str]:
        """Arguments of the methods: the scheme, the stored tensors, their reader, the group size
        and the layer's name."""
        bits = self.weight_bits
        offset = 0 if self.full_config.get("checkpoint_format") == "gptq_v2" else ONES[bits]
        read = functools.partial(read_gptq, bits=bits, symmetric=self.is_sym, offset=offset)
        return SCHEMES[f"W{bits}A16"], tensors_of(bits, awq=False), read, self.group_size, prefix
