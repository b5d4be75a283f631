# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""W8A8 and W8A8_DYNAMIC: int8 weights with scales per channel; int8 inputs with one static scale,
or a scale per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform.extension import (
    LEAST_QUANTIZED,
    RefusedError,
    group_list_type,
    grouped_matmul,
    is_nz,
)

from ascend_quantization.base import (
    Layout,
    Quantized,
    Scheme,
    Stored,
    Tensors,
    per_row,
    transpose_int8,
)

FUSED_STEP, FUSED_MOST = 64, 10496
"""Intermediate sizes that npu_dequant_swiglu_quant supports with groups: multiples of the first up
to the second (its documentation)."""
MOST_COLUMNS = 10240
"""Of the first matrix of npu_grouped_matmul_swiglu_quant_v2 (its documentation)."""


class W8A8(Scheme):
    """Scheme W8A8: x is quantized to q = round(x / input_scale + input_offset), y = (q @ weight +
    quant_bias) * deq_scale.

    ``quant_bias`` compensates the offset by -input_offset * sum(weight), and in a ModelSlim
    checkpoint includes the layer's bias; ``deq_scale`` is input_scale * weight_scale (msmodelslim,
    ``AscendV1Saver.on_w8a8_static``).
    """

    name = "W8A8"
    experts = False
    packed: ClassVar = ("weight", "deq_scale", "quant_bias", "input_factor", "input_offset")

    def stored(self, description: Mapping[str, Any], layer: str) -> dict[str, Stored]:
        of_inputs = Stored(torch.float32, Layout.INPUT)
        return {
            "weight": Stored(torch.int8),
            "quant_bias": Stored(torch.int32, Layout.CHANNELS),
            "deq_scale": Stored(torch.float32, Layout.CHANNELS),
            "input_scale": of_inputs,
            "input_offset": of_inputs,
        }

    def load(
        self, given: Tensors, dtype: torch.dtype, layer: str, first_rank: bool
    ) -> dict[str, torch.Tensor]:
        bias = given["quant_bias"] if first_rank else torch.zeros_like(given["quant_bias"])
        scale, offset = (
            shared_input_value(given[name], layer) for name in ("input_scale", "input_offset")
        )
        return self.pack_static(given["weight"], given["deq_scale"], bias, scale, offset, dtype)

    def pack_static(
        self,
        weight: torch.Tensor,
        factor: torch.Tensor,
        bias: torch.Tensor,
        scale: torch.Tensor,
        offset: torch.Tensor,
        dtype: torch.dtype,
    ) -> dict[str, torch.Tensor]:
        """Convert a matrix with static inputs to the tensors of the operators.

        Args:
            weight: int8 ``[out, in]``.
            factor: float32 ``[out]``, the dequantization scale.
            bias: int32 ``[out]``, added to the int32 matmul.
            scale: of the inputs, float32 ``[1]``.
            offset: of the inputs, float32 ``[1]``.
            dtype: of the outputs.
        """
        factor = factor.float().contiguous()
        if dtype == torch.float16:  # npu_quant_matmul would convert a float32 scale in each call.
            factor = torch_npu.npu_trans_quant_param(factor)
        return {
            "weight": transpose_int8(weight),
            "deq_scale": factor,
            "quant_bias": bias.contiguous(),
            "input_factor": 1 / scale,
            "input_offset": offset,
        }

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        of_inputs = own["input_factor"], own["input_offset"]
        values = torch_npu.npu_quantize(x, *of_inputs, torch.qint8, -1, False)
        options = {"bias": own["quant_bias"], "output_dtype": x.dtype}
        product = torch_npu.npu_quant_matmul(values, own["weight"], own["deq_scale"], **options)
        return product if bias is None else product.add_(bias)


def shared_input_value(given: torch.Tensor, layer: str) -> torch.Tensor:
    """The input scale or offset that all matrices of a fused layer share, float32 ``[1]``.

    Raises:
        RefusedError: the values differ.
    """
    if bool((given != given[0]).any()):
        raise RefusedError(
            f"the matrices of {layer} have different input scales or offsets"
            f" ({', '.join(f'{v:g}' for v in given.tolist())}); supported: one for all; fix:"
            " quantize them together"
        )
    return given[:1].clone()


class W8A8Dynamic(Scheme):
    name = "W8A8_DYNAMIC"
    int8_rows = True
    takes_rows = True

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"weight": transpose_int8(matrix.weight), "weight_scale": per_row(matrix.scale)}

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        values, scale = torch_npu.npu_dynamic_quant(x)
        return self.apply_int8(values, scale, own, bias, x.dtype)

    def apply_int8(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        own: Tensors,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        options = {"pertoken_scale": scale, "bias": bias, "output_dtype": dtype}
        return torch_npu.npu_quant_matmul(values, own["weight"], own["weight_scale"], **options)

    def pack_down(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        packed = self.pack(matrix, dtype)
        return packed | {"weight_scale": _output_scale(packed["weight_scale"], dtype)}

    def grouped_int8(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        own: Tensors,
        counts: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        factor = _output_scale(own["weight_scale"], dtype)
        return grouped_matmul(
            values, own["weight"], counts, scale=factor, per_token_scale=scale, output_dtype=dtype
        )

    def swiglu(
        self,
        first: Tensors,
        second: Tensors,
        rows: torch.Tensor,
        counts: torch.Tensor,
        scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        columns = first["weight"].shape[-1]
        is_fused = columns <= MOST_COLUMNS and is_nz(first["weight"])
        inner = columns // 2
        takes = LEAST_QUANTIZED <= inner <= FUSED_MOST and not inner % FUSED_STEP
        if not is_fused and not takes:
            return super().swiglu(first, second, rows, counts, scale, dtype)
        dtype = dtype or rows.dtype
        values, scale = torch_npu.npu_dynamic_quant(rows) if scale is None else (rows, scale)
        quantized = _matmul_swiglu_quant if is_fused else _matmul_then_swiglu_quant
        values, scale = quantized(first, values, scale, counts)
        return self.grouped_int8(values, scale, second, counts, dtype)


def _matmul_swiglu_quant(
    own: Tensors, values: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU of a grouped matmul in FRACTAL_NZ, as int8 with a scale for each row, by one
    operator."""
    return torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        values,
        [own["weight"]],
        [own["weight_scale"]],
        scale,
        counts,
        group_list_type=group_list_type(counts),
    )


def _matmul_then_swiglu_quant(
    own: Tensors, values: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_matmul_swiglu_quant`, in any format, by two operators."""
    sums = grouped_matmul(values, own["weight"], counts, output_dtype=torch.int32)
    return torch_npu.npu_dequant_swiglu_quant(
        sums,
        weight_scale=own["weight_scale"],
        activation_scale=scale,
        group_index=counts,
        activate_left=True,
        quant_mode=1,
    )


def _output_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """npu_grouped_matmul supports bfloat16 scales only for bfloat16 outputs, and float32 scales for
    float16."""
    return scale.to(dtype) if dtype == torch.bfloat16 else scale
