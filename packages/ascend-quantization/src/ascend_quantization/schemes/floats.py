# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Weights in floating-point formats of eight and four bits, multiplied as they are.

FP8 (e4m3) has float32 scales, per channel or per block of 128 by 128. In the MX formats 32 adjacent
inputs share an exponent (e8m0). Inputs are quantized dynamically, to FP8 per token or per 128
columns of a token, or to an MX format. Matrices are loaded as bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform.extension import RefusedError, grouped_matmul

from ascend_quantization.base import (
    Layout,
    Quantized,
    Scheme,
    Stored,
    Tensors,
)

E4M3 = torch.float8_e4m3fn
BLOCK = 128
"""Rows and columns of a weight's block, and columns of a token that share a scale."""
GROUP = 32
"""Values that share an exponent in the MX formats."""


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
    """Expand bytes ``[..., out, in / 2]`` with scales ``[..., out, in / 32]`` to ``[..., out, in]``
    of ``dtype``, one expert at a time."""
    pairs, powers = tables(packed.device)
    wide = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype, device=packed.device)
    matrices = (each.view(-1, *each.shape[-2:]) for each in (wide, packed, scale))
    for matrix, bytes_, exponents in zip(*matrices, strict=True):
        values = pairs.index_select(0, bytes_.flatten().int()).view(-1, GROUP)
        factors = powers.index_select(0, exponents.flatten().int()).unsqueeze(1)
        matrix.copy_((values * factors).view(matrix.shape))
    return wide


def in_e4m3(packed: torch.Tensor) -> torch.Tensor:
    """Bytes ``[..., 2 * n]`` in e4m3 of the same numbers as bytes ``[..., n]`` of two in e2m1."""
    pairs = tables(torch.device("cpu"))[0].to(E4M3).view(torch.uint8).to(packed.device)
    sizes = *packed.shape[:-1], 2 * packed.shape[-1]
    wide = torch.empty(sizes, dtype=torch.uint8, device=packed.device)
    for matrix, bytes_ in zip(wide, packed, strict=True):
        matrix.copy_(pairs.index_select(0, bytes_.flatten().int()).view(matrix.shape))
    return wide


def transposed_view(matrix: torch.Tensor) -> torch.Tensor:
    """The operators' view ``[..., in, out]`` of ``[..., out, in]``."""
    return matrix.transpose(-1, -2)


class FloatScheme(Scheme):
    """Base class: inputs are quantized, and multiplied by one operator.

    Attributes:
        width: bits of a weight.
    """

    width: ClassVar[int] = 8

    @property
    def bits(self) -> int:
        return self.width

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize rows: values, and their scales."""
        raise NotImplementedError

    def matmul_options(self) -> dict[str, Any]:
        """Arguments of npu_quant_matmul beside the tensors."""
        return {}

    def grouped_options(self) -> dict[str, Any]:
        """Arguments of npu_grouped_matmul beside the tensors."""
        return {}

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise RefusedError unless the operators quantize inputs of this dtype."""
        if dtype not in (torch.bfloat16, torch.float16):
            raise RefusedError(
                f"{self.name} needs inputs in bfloat16 or float16, and the model's dtype is {dtype};"
                " fix: --dtype bfloat16"
            )

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        values, scale = self.quantize(x)
        product = torch_npu.npu_quant_matmul(
            values,
            own["weight"],
            own["weight_scale"],
            pertoken_scale=scale,
            output_dtype=x.dtype,
            **self.matmul_options(),
        )
        # vllm-ascend found wrong sums of FP8 with a bias in the operator (w8a8fp8_dynamic.py), and
        # with blocks the operator takes none.
        return product if bias is None else product.add_(bias)

    def grouped(self, rows: torch.Tensor, own: Tensors, counts: torch.Tensor) -> torch.Tensor:
        values, scale = self.quantize(rows)
        return grouped_matmul(
            values,
            own["weight"],
            counts,
            scale=own["weight_scale"],
            per_token_scale=scale,
            output_dtype=rows.dtype,
            **self.grouped_options(),
            **({"bias": own["bias"]} if "bias" in own else {}),
        )


class W8A8FP8Dynamic(FloatScheme):
    """Scheme W8A8FP8_DYNAMIC: weights in e4m3 with a scale per channel, inputs with one per token."""

    name = "W8A8FP8_DYNAMIC"

    def stored(self, description: Mapping[str, Any], layer: str) -> dict[str, Stored]:
        return super().stored(description, layer) | {"weight": Stored(torch.uint8)}

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        self.check_dtype(dtype)
        return {
            "weight": transposed_view(matrix.weight.view(E4M3)),
            "weight_scale": matrix.scale.squeeze(-1).contiguous(),
        }

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = torch_npu.npu_dynamic_quant(x, dst_type=E4M3)
        return values, scale


class W8A8FP8Block(FloatScheme):
    """FP8 checkpoints with blocks of 128 by 128; ``Quantized.scale`` is ``[..., out / 128, in /
    128]``, rounded up."""

    name = "W8A8FP8_BLOCK"

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        self.check_dtype(dtype)
        return {
            "weight": transposed_view(matrix.weight.view(E4M3)),
            "weight_scale": transposed_view(matrix.scale),
        }

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = torch_npu.npu_dynamic_block_quant(
            x, dst_type=E4M3, row_block_size=1, col_block_size=BLOCK
        )
        return values, scale

    def matmul_options(self) -> dict[str, Any]:
        return {"group_sizes": [1, BLOCK, BLOCK]}


class MXScheme(FloatScheme):
    """Base class of the MX formats.

    Attributes:
        four_inputs: whether inputs are in e2m1, two in a byte; e4m3 otherwise.
    """

    groups = True
    expert_groups = True
    group_size = GROUP
    four_inputs: ClassVar[bool] = False

    def stored(self, description: Mapping[str, Any], layer: str) -> dict[str, Stored]:
        return {
            "weight": Stored(torch.uint8, columns=8 // self.bits),
            "weight_scale": Stored(torch.uint8, Layout.GROUPS),
        }

    def read(self, given: Tensors) -> Quantized:
        weight = given["weight_packed"] if "weight_packed" in given else given["weight"]
        return Quantized(weight, given["weight_scale"])

    def checked(self, matrix: Quantized, layer: str) -> Quantized:
        inputs = matrix.weight.shape[-1] * 8 // self.bits
        self.check_groups(inputs, matrix.scale.shape[-1], matrix.weight.dim() > 2, layer)
        return matrix

    def step(self, experts: bool) -> int:
        """A number that divides the inputs of a matrix."""
        return GROUP

    def check_groups(self, inputs: int, groups: int, experts: bool, layer: str) -> None:
        step = self.step(experts)
        if inputs != groups * GROUP or inputs % step:
            raise RefusedError(
                f"{layer} is {self.name} with {groups} exponents per channel for this rank's"
                f" {inputs} inputs; supported: one for {GROUP} inputs, and multiples of {step}"
                " inputs; fix: quantize the model again, or lower --tensor-parallel-size"
            )

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        self.check_dtype(dtype)
        scale = torch.nn.functional.pad(matrix.scale, (0, matrix.scale.shape[-1] % 2))
        weight = matrix.weight.view(E4M3) if self.bits == 8 else matrix.weight
        return {
            "weight": transposed_view(weight),
            "weight_scale": scale.unflatten(-1, (-1, 2)).transpose(-2, -3),
        }

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # scale_alg 1 rounds an exponent up where 0, OCP's, lets e4m3 saturate; vLLM's own
        # quantization does so, too. e2m1 does not have it.
        options = {"dst_type": E4M3, "scale_alg": 1}
        if self.four_inputs:
            options = {"dst_type": torch_npu.float4_e2m1fn_x2}
        values, scale = torch_npu.npu_dynamic_mx_quant(x, **options)
        return values, scale

    def matmul_options(self) -> dict[str, Any]:
        names = ("scale_dtype", "pertoken_scale_dtype")
        exponents = dict.fromkeys(names, torch_npu.float8_e8m0fnu)
        return exponents | self.four_bits("x1_dtype", "x2_dtype")

    def grouped_options(self) -> dict[str, Any]:
        names = ("scale_dtype", "per_token_scale_dtype")
        exponents = dict.fromkeys(names, torch_npu.float8_e8m0fnu)
        return exponents | self.four_bits("x_dtype", "weight_dtype")

    def four_bits(self, inputs: str, weight: str) -> dict[str, int]:
        """The dtypes that torch_npu is told of, because their tensors are of uint8."""
        names = [inputs] * self.four_inputs + [weight] * (self.bits == 4)
        return dict.fromkeys(names, torch_npu.float4_e2m1fn_x2)


class W8A8MXFP8(MXScheme):
    name = "W8A8_MXFP8"


WIDE = W8A8MXFP8()


class W4A8MXFP(MXScheme):
    """Scheme W4A8_MXFP. Experts' weights are widened at load to e4m3, which has all numbers of e2m1,
    because npu_grouped_matmul takes e2m1 beside e4m3 only in a form of FRACTAL_NZ."""

    name = "W4A8_MXFP"
    width = 4

    def step(self, experts: bool) -> int:
        return GROUP if experts else 2 * GROUP  # npu_quant_matmul, of e4m3 and e2m1

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if matrix.weight.dim() == 2:
            return super().pack(matrix, dtype)
        return WIDE.pack(Quantized(in_e4m3(matrix.weight), matrix.scale), dtype)

    def grouped_options(self) -> dict[str, Any]:
        return WIDE.grouped_options()


class W4A4MXFP4(MXScheme):
    name = "W4A4_MXFP4"
    width = 4
    four_inputs = True


class W4A16MXFP4(MXScheme):
    """Scheme W4A16_MXFP4: inputs are not quantized, and weights expanded at load, exactly, because
    the operators of e2m1 weights take quantized inputs."""

    name = "W4A16_MXFP4"
    width = 4
    packed = ("weight",)

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype == torch.float16:
            raise RefusedError(
                f"{self.name} needs inputs in bfloat16 or float32, because its exponents exceed"
                " float16's; fix: --dtype bfloat16"
            )

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        self.check_dtype(dtype)
        return {"weight": transposed_view(expanded(matrix.weight, matrix.scale, dtype))}

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, transposed_view(own["weight"]), bias)

    def grouped(self, rows: torch.Tensor, own: Tensors, counts: torch.Tensor) -> torch.Tensor:
        return grouped_matmul(rows, own["weight"], counts)
