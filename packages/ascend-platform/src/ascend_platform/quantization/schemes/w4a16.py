"""W4A16: four-bit weights with per-channel or per-group scales and offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ascend_platform.quantization.base import Layout, Quantized, Stored, Tensors, pack_int4, unpack_words
from ascend_platform.quantization.schemes.weight_only import WeightOnly


class W4A16(WeightOnly):
    """Scheme W4A16. ModelSlim checkpoints have values of -8 to 7 in bytes (``weight``), or eight in a word in the format of
    compressed-tensors (``weight_packed``, as in the experts of Kimi-K2-Thinking)."""

    name = "W4A16"
    bits = 4
    expert_groups = True

    def stored(self, description: Mapping[str, Any], layer: str) -> dict[str, Stored]:
        if f"{layer}.weight_packed" in description:
            return {"weight_packed": Stored(torch.int32, columns=8), "weight_scale": Stored(torch.float32, Layout.GROUPS)}
        return super().stored(description, layer)

    def read(self, given: Tensors) -> Quantized:
        if "weight_packed" in given:
            return Quantized(unpack_words(given["weight_packed"], self.bits), given["weight_scale"].float())
        return super().read(given)

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return pack_int4(weight)
