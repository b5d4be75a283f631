# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""W4A8_DYNAMIC: four-bit weights with per-channel or per-group scales, int8 inputs with per-token
scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from ascend_platform.extension import grouped_matmul

from ascend_quantization.base import (
    Layout,
    Quantized,
    Scheme,
    Stored,
    Tensors,
    pack_int4,
    unpack_int4_rows,
)


class W4A8Dynamic(Scheme):
    """Scheme W4A8_DYNAMIC by npu_grouped_matmul, the one operator for int8 by int4; a linear layer
    is a single group.

    The operator splits an int8 into two signed four-bit parts, which subtracts 8 times the sums of
    the matrix from the result; they are added as a bias (op-plugin,
    ``test_npu_grouped_matmul_A8W4``). Checkpoints contain it as ``scale_bias``; it is computed here
    instead, so that each rank has the sums of its own part.
    """

    name = "W4A8_DYNAMIC"
    groups = True
    expert_groups = True
    int8_rows = True
    packed: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "scale_bias")

    def stored(self, description: Mapping[str, Any], layer: str) -> dict[str, Stored]:
        """See Scheme. Since version 1.0.0 of the format a byte has two rows; per-group scales
        multiply the per-channel scales."""
        rows = 2 if description.get("version") == "1.0.0" else 1
        tensors = {"weight": Stored(torch.int8, rows=rows)}
        for name in ("weight_scale", "weight_offset"):
            tensors[name] = Stored(torch.float32, Layout.COLUMN)
            if f"{layer}.weight_scale_second" in description:
                tensors[f"{name}_second"] = Stored(torch.float32, Layout.GROUPS)
        return tensors

    def read(self, given: Tensors) -> Quantized:
        scale, zero = given["weight_scale"].float(), given["weight_offset"].float()
        if "weight_scale_second" in given:
            second = given["weight_offset_second"].float()
            scale, zero = scale * given["weight_scale_second"], second + zero
        weight = given["weight"]
        # Packed weights have half as many rows as scales.
        if weight.shape[-2] < scale.shape[-2]:
            weight = unpack_int4_rows(weight)
        return Quantized(weight, scale, zero)

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        # [..., groups, out]
        weight, scale = matrix.weight, matrix.scale.transpose(-1, -2).contiguous()
        if weight.dim() == 2:
            weight, scale = weight.unsqueeze(0), scale.unsqueeze(0)
        sums = (
            weight.unflatten(-1, (scale.shape[1], -1)).sum(-1, dtype=torch.float32).transpose(1, 2)
        )
        return {
            "weight": pack_int4(weight),
            # The bits of a float in the lower half of an int64.
            "weight_scale": scale.view(torch.int32).long(),
            "scale_bias": 8 * (sums * scale).sum(1),
        }

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        counts = torch.full((1,), len(x), dtype=torch.int64, device=x.device)
        product = self.grouped(x, own, counts)
        return product if bias is None else product.add_(bias)

    def grouped_int8(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        own: Tensors,
        counts: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        scales = {"scale": own["weight_scale"], "per_token_scale": scale, "bias": own["scale_bias"]}
        return grouped_matmul(values, own["weight"], counts, **scales, output_dtype=dtype)
