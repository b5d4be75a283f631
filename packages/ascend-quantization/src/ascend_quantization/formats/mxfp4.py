# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""MXFP4 checkpoints of gpt-oss: experts in e2m1 with a power of two per 32 inputs, multiplied by
inputs in MXFP8 where the chip has that, elsewhere expanded exactly to the model's dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from ascend_platform.extension import NPUFusedMoEMethod
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.utils.math_utils import round_up

from ascend_quantization.common import MXFP4, fp8_target
from ascend_quantization.methods.experts import CheckpointExperts, QuantizedExperts
from ascend_quantization.methods.linear import replace
from ascend_quantization.schemes import SCHEMES
from ascend_quantization.schemes.floats import GROUP, expanded


@register_quantization_config(MXFP4)
class NPUMxfp4Config(GptOssMxfp4Config):
    """vLLM's configuration, with experts for NPUs."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of CUDA

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]  # The range of float16 is too small.

    def _make_moe_method(self, moe: FusedMoEConfig) -> FusedMoEMethodBase:
        return MXExperts(moe) if fp8_target() == "native" else ExpandedExperts(moe)


class WholeGroups:
    """Mixin for experts in MXFP4 with gpt-oss's loader: ranks have whole groups, and biases in
    float32 with bfloat16 weights."""

    weight_dtype = MXFP4  # selects gpt-oss's loader in vLLM
    moe: FusedMoEConfig
    dtype: torch.dtype

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        return hidden_size, round_up(intermediate_size_per_partition, GROUP)

    def biases(
        self, num_experts: int, rows: tuple[int, ...]
    ) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """See ``CheckpointExperts.tensors``."""
        if self.moe.has_bias:
            wide = torch.float32 if self.dtype == torch.bfloat16 else self.dtype
            yield "bias", torch.zeros(num_experts, sum(rows), dtype=wide), {}


class ExpandedExperts(WholeGroups, CheckpointExperts, NPUFusedMoEMethod):
    """Experts of an MXFP4 checkpoint, loaded as bytes and expanded to the model's dtype."""

    def tensors(
        self, num_experts: int, rows: tuple[int, ...], inputs: int
    ) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        for name, width in (("weight", inputs // 2), ("weight_scale", inputs // GROUP)):
            yield name, torch.zeros(num_experts, sum(rows), width, dtype=torch.uint8), {}
        yield from self.biases(num_experts, rows)

    def process_weights_after_loading(self, layer: Any) -> None:
        names = "weight", "weight_scale"
        for prefix in ("w13_", "w2_"):
            packed, scale = (getattr(layer, prefix + name).data for name in names)
            replace(layer, names, {"weight": expanded(packed, scale, self.dtype)}, prefix)
        super().process_weights_after_loading(layer)


class MXExperts(WholeGroups, QuantizedExperts):
    """Experts of an MXFP4 checkpoint, by the scheme W4A8_MXFP."""

    takes_biases = True
    activations = NPUFusedMoEMethod.activations

    def __init__(self, moe: FusedMoEConfig) -> None:
        scheme = SCHEMES["W4A8_MXFP"]
        super().__init__(moe, scheme, scheme.stored({}, ""), scheme.read, GROUP, "experts")

    def tensors(
        self, num_experts: int, rows: tuple[int, ...], inputs: int
    ) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        yield from super().tensors(num_experts, rows, inputs)
        yield from self.biases(num_experts, rows)
