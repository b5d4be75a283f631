"""W8A8_DYNAMIC: int8 weights with per-channel scales, int8 inputs with dynamic per-token scales."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch_npu

from ascend_platform.ops.fused_moe import grouped_matmul
from ascend_platform.quantization.base import Quantized, Scheme, Tensors, per_row, transpose_int8

FUSED_STEP, FUSED_MOST = 64, 10496
"""Intermediate sizes that npu_dequant_swiglu_quant supports with groups: multiples of the first up to the second (its
documentation)."""


class W8A8Dynamic(Scheme):
    name = "W8A8_DYNAMIC"
    packed_experts: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "grouped_scale")

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        scale = per_row(matrix.scale)
        packed = {"weight": transpose_int8(matrix.weight), "weight_scale": scale}
        if matrix.weight.dim() > 2:  # for bfloat16 outputs npu_grouped_matmul supports bfloat16 scales only
            packed["grouped_scale"] = scale.to(dtype) if dtype == torch.bfloat16 else scale
        return packed

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        values, scale = torch_npu.npu_dynamic_quant(x)
        return torch_npu.npu_quant_matmul(
            values, own["weight"], own["weight_scale"], pertoken_scale=scale, bias=bias, output_dtype=x.dtype
        )

    def grouped(self, rows: torch.Tensor, own: Tensors, counts: torch.Tensor) -> torch.Tensor:
        values, scale = torch_npu.npu_dynamic_quant(rows)
        return self._grouped(values, scale, own, counts, rows.dtype)

    def swiglu(self, first: Tensors, second: Tensors, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        inner = first["weight"].shape[-1] // 2
        if inner % FUSED_STEP or inner > FUSED_MOST:
            return super().swiglu(first, second, rows, counts)
        values, scale = torch_npu.npu_dynamic_quant(rows)
        sums = grouped_matmul(values, first["weight"], counts, output_dtype=torch.int32)
        values, scale = torch_npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=first["weight_scale"],
            activation_scale=scale,
            group_index=counts,
            activate_left=True,
            quant_mode=1,
        )
        return self._grouped(values, scale, second, counts, rows.dtype)

    def _grouped(
        self, values: torch.Tensor, scale: torch.Tensor, own: Tensors, counts: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        scales = {"scale": own["grouped_scale"], "per_token_scale": scale}
        return grouped_matmul(values, own["weight"], counts, **scales, output_dtype=dtype)
