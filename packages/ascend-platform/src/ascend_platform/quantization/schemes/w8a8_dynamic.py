"""W8A8_DYNAMIC: int8 weights with per-channel scales, int8 inputs with dynamic per-token scales."""

from __future__ import annotations

import torch
import torch_npu

from ascend_platform.ops.fused_moe import grouped_matmul
from ascend_platform.quantization.base import Quantized, Scheme, Tensors, per_row, transpose_int8

FUSED_STEP, FUSED_MOST = 64, 10496
"""Intermediate sizes that npu_dequant_swiglu_quant supports with groups: multiples of the first up to the second (its
documentation)."""


class W8A8Dynamic(Scheme):
    name = "W8A8_DYNAMIC"
    int8_rows = True

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"weight": transpose_int8(matrix.weight), "weight_scale": per_row(matrix.scale)}

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        values, scale = torch_npu.npu_dynamic_quant(x)
        return torch_npu.npu_quant_matmul(
            values, own["weight"], own["weight_scale"], pertoken_scale=scale, bias=bias, output_dtype=x.dtype
        )

    def pack_down(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        packed = self.pack(matrix, dtype)
        return packed | {"weight_scale": _output_scale(packed["weight_scale"], dtype)}

    def grouped(self, rows: torch.Tensor, own: Tensors, counts: torch.Tensor) -> torch.Tensor:
        values, scale = torch_npu.npu_dynamic_quant(rows)
        return self.grouped_int8(values, scale, own, counts, rows.dtype)

    def grouped_int8(
        self, values: torch.Tensor, scale: torch.Tensor, own: Tensors, counts: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        factor = _output_scale(own["weight_scale"], dtype)
        return grouped_matmul(values, own["weight"], counts, scale=factor, per_token_scale=scale, output_dtype=dtype)

    def swiglu(
        self,
        first: Tensors,
        second: Tensors,
        rows: torch.Tensor,
        counts: torch.Tensor,
        scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        inner = first["weight"].shape[-1] // 2
        if inner % FUSED_STEP or inner > FUSED_MOST:
            return super().swiglu(first, second, rows, counts, scale, dtype)
        dtype = dtype or rows.dtype
        values, scale = torch_npu.npu_dynamic_quant(rows) if scale is None else (rows, scale)
        sums = grouped_matmul(values, first["weight"], counts, output_dtype=torch.int32)
        values, scale = torch_npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=first["weight_scale"],
            activation_scale=scale,
            group_index=counts,
            activate_left=True,
            quant_mode=1,
        )
        return self.grouped_int8(values, scale, second, counts, dtype)


def _output_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """npu_grouped_matmul supports bfloat16 scales only for bfloat16 outputs, and float32 scales for float16."""
    return scale.to(dtype) if dtype == torch.bfloat16 else scale
