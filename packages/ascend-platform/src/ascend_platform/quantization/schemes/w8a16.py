"""W8A16: int8 weights with per-channel scales and offsets, in linear layers also per-group."""

from __future__ import annotations

import torch

from ascend_platform.quantization.schemes.weight_only import WeightOnly


class W8A16(WeightOnly):
    name = "W8A16"

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.transpose(-1, -2).contiguous()
