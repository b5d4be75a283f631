# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""DeepSeek-V4's checkpoints: linear layers in FP8 by blocks, and experts in MXFP4 or in FP8, all
converted at load."""

from __future__ import annotations

from typing import Any

import torch
from ascend_platform.extension import RefusedError
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported, RoutedExperts
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from ascend_quantization.common import DEEPSEEK_V4, FP8, fp8_target
from ascend_quantization.formats.fp8 import NPUFp8Config
from ascend_quantization.formats.mxfp4 import ExpandedExperts
from ascend_quantization.methods.fp8 import INT8, loading


def as_bytes(loaded: torch.Tensor) -> torch.Tensor:
    """Two numbers of e2m1, or an exponent, in each byte: the checkpoint has signed bytes, or
    e8m0."""
    return loaded.view(torch.uint8)


class PackedExperts(ExpandedExperts):
    """Experts in MXFP4, a matrix of each expert in the checkpoint, expanded to the model's dtype."""

    weight_dtype = ""  # gpt-oss's loader is not used.

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        named["weight_loader"] = loading(named["weight_loader"], as_bytes)
        named["quant_method"] = FusedMoeWeightScaleSupported.GROUP.value
        super().create_weights(layer, *arguments, **named)


@register_quantization_config(DEEPSEEK_V4)
class NPUDeepseekV4Config(NPUFp8Config):
    """vLLM's configuration, with linear layers and experts that are converted at load."""

    target = "dequantize"

    @classmethod
    def get_name(cls) -> Any:
        return DEEPSEEK_V4

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """This method for the model's FP8 checkpoints, whose configuration says ``fp8``; importing
        vLLM's own class would import the model for each device."""
        method = hf_quant_cfg.get("quant_method") if isinstance(hf_quant_cfg, dict) else None
        # vLLM makes a drafter's configuration of the model's.
        is_drafter = "DeepSeekV4MTPModel" in (getattr(hf_config, "architectures", None) or ())
        is_own = is_drafter or getattr(hf_config, "model_type", None) == "deepseek_v4"
        return DEEPSEEK_V4 if is_own and method in (FP8, DEEPSEEK_V4) else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """As of FP8 checkpoints, but experts by the model's ``expert_dtype``.

        Raises:
            RefusedError: weights that are to be converted to int8.
        """
        if fp8_target() == INT8:
            raise RefusedError(
                f"ascend.platform.fp8 is {INT8}; DeepSeek-V4's weights are converted to the model's"
                " dtype only; fix: remove it"
            )
        config = get_current_vllm_config().model_config.hf_config
        if isinstance(layer, RoutedExperts) and getattr(config, "expert_dtype", "fp4") == "fp4":
            return PackedExperts(layer.moe_config)
        return super().get_quant_method(layer, prefix)
