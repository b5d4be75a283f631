# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""FP8 checkpoints (``quant_method`` "fp8"): vLLM's configuration, with weights that are multiplied
as they are, or converted at load.

Blocks of 128 by 128 with ``weight_scale_inv`` (DeepSeek-V3, Kimi-K2, GLM-5, MiniMax-M2, Qwen3-FP8),
or one ``weight_scale`` per matrix. Inputs of weights that stay are quantized dynamically: static
scales (``input_scale``) are not loaded.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from ascend_platform.extension import RefusedError
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.models.utils import WeightsMapper

from ascend_quantization.common import FP8, check_chip, fp8_target
from ascend_quantization.methods import fp8
from ascend_quantization.methods.fp8 import Fp8Format
from ascend_quantization.schemes.floats import BLOCK

UNUSED = WeightsMapper(orig_to_new_suffix={".input_scale": None})


def _is_unexpected(record: logging.LogRecord) -> bool:
    expected = torch.float8_e4m3fn, torch.uint8
    return not isinstance(record.args, tuple) or record.args[1:] != expected


# vLLM warns of each matrix whose dtype differs from its parameter's (models/utils.py).
logging.getLogger("vllm.model_executor.models.utils").addFilter(_is_unexpected)


def method_of(
    layer: torch.nn.Module, form: Fp8Format, prefix: str, target: str | None = None
) -> QuantizeMethodBase:
    """The method of a linear layer or of experts. MLA's kv_b_proj, whose matrix is multiplied into
    others, is dequantized.

    Args:
        target: as of :func:`fp8_target`, its result by default.

    Raises:
        RefusedError: the chip does not support the scheme that the weights are converted to, or
            multiplies blocks of another size.
    """
    target = target or fp8_target()
    if prefix.endswith("kv_b_proj"):
        target = "dequantize"
    if target == fp8.INT8:
        check_chip([fp8.INT8])
    if target == "native" and min(form.block) > 1 and form.block != (BLOCK, BLOCK):
        raise RefusedError(
            f"the FP8 checkpoint has blocks of {form.block[0]} by {form.block[1]}; supported: {BLOCK}"
            f" by {BLOCK}; fix: --additional-config"
            ' \'{"ascend": {"platform": {"fp8": "dequantize"}}}\''
        )
    if isinstance(layer, RoutedExperts):
        moe = layer.moe_config
        if target == "dequantize":
            return fp8.DequantizedExperts(moe, form)
        of_experts = fp8.RequantizedExperts if target == fp8.INT8 else fp8.KeptExperts
        return of_experts(moe, form, prefix)
    if target == "dequantize":
        return fp8.DequantizedLinearMethod(form)
    of_linear = fp8.RequantizedLinearMethod if target == fp8.INT8 else fp8.KeptLinearMethod
    return of_linear(form, prefix)


@register_quantization_config(FP8)
class NPUFp8Config(Fp8Config):
    """vLLM's configuration, with linear layers and experts for NPUs."""

    target: str | None = None
    """See :func:`method_of`."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of CUDA

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8Config:
        """As in vLLM.

        Raises:
            RefusedError: weights that are not e4m3, or experts that are stored as MXFP4.
        """
        if (form := str(config.get("fmt") or "e4m3")) not in ("e4m3", "float8_e4m3fn"):
            found = f"the FP8 checkpoint has {form} weights; supported: e4m3"
            raise RefusedError(f"{found}; fix: use another checkpoint")
        if store := config.get("store_dtype"):
            found = f"the FP8 checkpoint has experts stored as {store}; supported: FP8"
            raise RefusedError(f"{found}; fix: use another checkpoint")
        return super().from_config(config)

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        return QuantizationConfig.get_checkpoint_weight_mapper() | UNUSED

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase | RoutedExperts):
            return super().get_quant_method(layer, prefix)
        skipped = is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        )
        form = Fp8Format("weight_scale", (0, 0))
        if blocks := self.weight_block_size:
            form = Fp8Format("weight_scale_inv", (blocks[0], blocks[1]))
        if not skipped:
            return method_of(layer, form, prefix, self.target)
        if isinstance(layer, RoutedExperts):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return UnquantizedLinearMethod()
