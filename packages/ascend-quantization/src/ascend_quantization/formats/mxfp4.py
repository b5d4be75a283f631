# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""MXFP4 checkpoints of gpt-oss: experts in e2m1 with a power of two per 32 inputs, expanded exactly
to the model's dtype."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from ascend_platform.extension import NPUFusedMoEMethod
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.utils.math_utils import round_up

from ascend_quantization.common import MXFP4
from ascend_quantization.methods.experts import CheckpointExperts
from ascend_quantization.methods.linear import replace

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 without the sign, which is the highest of the four bits (OCP Microscaling Formats,
section 5.3.3)."""


@functools.cache
def tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 values of each byte: the two of e2m1 ``[256, 2]``, lower half first, and the power of
    two of e8m0 ``[256]``."""
    every = torch.arange(256, dtype=torch.uint8, device="cpu")
    signed = [*MAGNITUDES, *(-each for each in MAGNITUDES)]
    values = torch.tensor(signed, dtype=torch.float32, device="cpu")
    pairs = values[torch.stack((every & 15, every >> 4), 1).long()]
    return pairs.to(device), every.view(torch.float8_e8m0fnu).float().to(device)


def expanded(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Expand bytes ``[experts, out, in / 2]`` with scales ``[experts, out, in / 32]`` to
    ``[experts, out, in]`` of ``dtype``."""
    pairs, powers = tables(packed.device)
    made = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype, device=packed.device)
    for matrix, bytes_, exponents in zip(made, packed, scale, strict=True):
        values = pairs.index_select(0, bytes_.flatten().int()).view(-1, BLOCK)
        factors = powers.index_select(0, exponents.flatten().int()).unsqueeze(1)
        matrix.copy_((values * factors).view(matrix.shape))
    return made


@register_quantization_config(MXFP4)
class NPUMxfp4Config(GptOssMxfp4Config):
    """vLLM's configuration, with experts that are expanded at load."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of CUDA

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]  # The range of float16 is too small.

    def _make_moe_method(self, moe: FusedMoEConfig) -> FusedMoEMethodBase:
        return ExpandedExperts(moe)


class ExpandedExperts(CheckpointExperts, NPUFusedMoEMethod):
    """Experts of an MXFP4 checkpoint, loaded as bytes and expanded to the model's dtype."""

    weight_dtype = MXFP4  # selects gpt-oss's loader in vLLM

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        # ranks have whole blocks
        return hidden_size, round_up(intermediate_size_per_partition, BLOCK)

    def tensors(
        self, num_experts: int, rows: tuple[int, ...], inputs: int
    ) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        for name, width in (("weight", inputs // 2), ("weight_scale", inputs // BLOCK)):
            yield name, torch.zeros(num_experts, sum(rows), width, dtype=torch.uint8), {}
        if self.moe.has_bias:
            wide = torch.float32 if self.dtype == torch.bfloat16 else self.dtype
            yield "bias", torch.zeros(num_experts, sum(rows), dtype=wide), {}

    def process_weights_after_loading(self, layer: Any) -> None:
        names = "weight", "weight_scale"
        for prefix in ("w13_", "w2_"):
            packed, scale = (getattr(layer, prefix + name).data for name in names)
            replace(layer, names, {"weight": expanded(packed, scale, self.dtype)}, prefix)
        super().process_weights_after_loading(layer)
