"""Base class of W8A16 and W4A16: weights are dequantized to the inputs' dtype inside the matrix multiplication."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch_npu

from ascend_platform.ops.fused_moe import grouped_matmul
from ascend_platform.quantization.base import Quantized, Scheme, Tensors, per_row


class WeightOnly(Scheme):
    groups = True
    offsets = True
    packed: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_offset")

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        # the operators add the offset; those of experts want it
        offset = torch.zeros_like(matrix.scale) if matrix.zero_point is None else -matrix.zero_point
        weight = self.pack_weight(matrix.weight)
        return {"weight": weight, "weight_scale": per_row(matrix.scale.to(dtype)), "weight_offset": per_row(offset.to(dtype))}

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
        return grouped_matmul(
            rows, own["weight"], counts, antiquant_scale=own["weight_scale"], antiquant_offset=own["weight_offset"]
        )
