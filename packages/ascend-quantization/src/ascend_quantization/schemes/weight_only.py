# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""W8A16 and W4A16: int8 and four-bit weights, dequantized to the inputs' dtype inside the matrix
multiplication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform.extension import grouped_matmul

from ascend_quantization.base import (
    Layout,
    Quantized,
    Scheme,
    Stored,
    Tensors,
    pack_int4,
    per_row,
    unpack_words,
)


class WeightOnly(Scheme):
    groups = True
    offsets = True
    packed: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_offset")

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        # The linear operators add the offset; the grouped ones take it as an argument.
        offset = torch.zeros_like(matrix.scale) if matrix.zero_point is None else -matrix.zero_point
        weight = self.pack_weight(matrix.weight)
        return {
            "weight": weight,
            "weight_scale": per_row(matrix.scale.to(dtype)),
            "weight_offset": per_row(offset.to(dtype)),
        }

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Convert int8 ``[..., out, in]`` to the operators' ``[..., in, out]``."""
        raise NotImplementedError

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        scale = own["weight_scale"]
        return torch_npu.npu_weight_quant_batchmatmul(
            x,
            own["weight"],
            scale,
            own["weight_offset"],
            bias=bias.float() if bias is not None and x.dtype == torch.bfloat16 else bias,
            antiquant_group_size=x.shape[1] // len(scale) if scale.dim() == 2 else 0,
        )

    def grouped(self, rows: torch.Tensor, own: Tensors, counts: torch.Tensor) -> torch.Tensor:
        options = {"antiquant_scale": own["weight_scale"], "antiquant_offset": own["weight_offset"]}
        return grouped_matmul(rows, own["weight"], counts, **options)


class W8A16(WeightOnly):
    """Scheme W8A16, with per-channel scales and offsets, in linear layers also per-group."""

    name = "W8A16"

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.transpose(-1, -2).contiguous()


class W4A16(WeightOnly):
    """Scheme W4A16, with per-channel or per-group scales and offsets.

    ModelSlim checkpoints have values of -8 to 7 in bytes (``weight``), or eight in a word in the
    format of compressed-tensors (``weight_packed``, as in the experts of Kimi-K2-Thinking).
    """

    name = "W4A16"
    expert_groups = True

    def stored(self, description: Mapping[str, Any], layer: str) -> dict[str, Stored]:
        if f"{layer}.weight_packed" in description:
            return {
                "weight_packed": Stored(torch.int32, columns=8),
                "weight_scale": Stored(torch.float32, Layout.GROUPS),
            }
        return super().stored(description, layer)

    def read(self, given: Tensors) -> Quantized:
        if "weight_packed" in given:
            weight = unpack_words(given["weight_packed"], self.bits)
            return Quantized(weight, given["weight_scale"].float())
        return super().read(given)

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return pack_int4(weight)
