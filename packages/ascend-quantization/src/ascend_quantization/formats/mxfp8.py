# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""MXFP8 checkpoints of ModelOpt and MiniMax, and ``--quantization mxfp8``, which quantizes a
bfloat16 checkpoint at load: vLLM's configurations, with experts on grouped matrix multiplications.

Linear layers are vLLM's own, on the kernel that ``formats/compressed_tensors.py`` registers.
"""

from __future__ import annotations

from typing import Any

import torch
from ascend_platform.extension import RefusedError
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config
from vllm.model_executor.layers.quantization.online import base
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.quantization.online.mxfp8 import Mxfp8OnlineLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic

from ascend_quantization.base import Quantized
from ascend_quantization.common import MODELOPT_MXFP8, MXFP8
from ascend_quantization.methods.experts import QuantizedExperts
from ascend_quantization.methods.linear import replace
from ascend_quantization.schemes import SCHEMES

SCHEME = SCHEMES["W8A8_MXFP8"]


class NPUMxfp8Config(ModelOptMxFp8Config):
    """vLLM's configuration, with experts for NPUs."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of CUDA

    def get_supported_act_dtypes(self) -> list[torch.dtype]:  # vLLM's has self
        return [torch.bfloat16, torch.float16]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelOptMxFp8Config:
        """As in vLLM.

        Raises:
            RefusedError: a quantized KV cache.
        """
        parsed = super().from_config(config)
        if parsed.kv_cache_quant_algo:
            raise RefusedError(
                f"the MXFP8 checkpoint asks for a KV cache in {parsed.kv_cache_quant_algo}; supported:"
                " one in the model's dtype; fix: quantize the model again without"
            )
        return parsed

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, Attention | MLAAttention):
            return None
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        if self.is_layer_excluded(prefix):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        stored = SCHEME.stored({}, prefix)
        options = (SCHEME, stored, SCHEME.read, SCHEME.group_size, prefix)
        return QuantizedExperts(layer.moe_config, *options)


for _name in (MXFP8, MODELOPT_MXFP8):
    register_quantization_config(_name)(NPUMxfp8Config)


def in_mxfp8(weight: torch.Tensor) -> Quantized:
    """A matrix, or one per expert, in MXFP8, as bytes."""
    values, scale = SCHEME.quantize(weight)
    groups = weight.shape[-1] // SCHEME.group_size
    return Quantized(values.view(torch.uint8), scale.flatten(-2)[..., :groups])


class OnlineLinearMethod(Mxfp8OnlineLinearMethod):
    """Linear layer that is quantized at load, by an operator of the NPU."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        matrix = in_mxfp8(self.get_weight_for_quantization(layer).contiguous())
        replace(layer, ("weight",), {"weight": matrix.weight, "weight_scale": matrix.scale})
        self.kernel.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True


class OnlineExperts(QuantizedExperts):
    """Experts that are quantized at load."""

    uses_meta_device = True
    create_weights = OnlineMoEMethodBase.create_weights

    def __init__(self, *, moe: FusedMoEConfig) -> None:
        super().__init__(moe, SCHEME, {}, SCHEME.read, SCHEME.group_size, "experts")

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        for prefix in ("w13_", "w2_"):
            weight = getattr(layer, f"{prefix}weight").data
            matrix = SCHEME.checked(in_mxfp8(weight), self.name)
            replace(layer, ("weight",), SCHEME.pack(matrix, weight.dtype), prefix)
        self.setup_experts(layer)
        layer._already_called_process_weights_after_loading = True


LINEAR_METHODS = base._ONLINE_LINEAR_METHODS | {kMxfp8Dynamic: OnlineLinearMethod}
EXPERTS = base._ONLINE_MOE_METHODS | {kMxfp8Dynamic: OnlineExperts}
"""The tables of vLLM for online quantization, with the methods for MXFP8 (overrides.toml)."""
