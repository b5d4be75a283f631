# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Base class of quantization schemes; quantized matrices, their checks, and their storage in
checkpoints."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch_npu
from ascend_platform import extension
from ascend_platform.extension import RefusedError, to_nz

from ascend_quantization.common import uses_weight_nz

Tensors = Mapping[str, torch.Tensor]

GROUP_STEP = 32
"""Group sizes are multiples of this (npu_weight_quant_batchmatmul, antiquant_group_size)."""
MOST = 65535
"""Inputs and outputs of a matrix (npu_quant_matmul, npu_weight_quant_batchmatmul and
npu_grouped_matmul)."""


class Quantized(NamedTuple):
    """A quantized matrix, or one per expert (``...`` is empty, or the experts).

    Values are (weight - zero_point) * scale.

    Attributes:
        weight: int8 ``[..., out, in]``, also for four-bit values.
        scale: float32 ``[..., out, groups]``, each for in / groups adjacent inputs of an output
            channel.
        zero_point: float32 with the shape of scale; None means 0 throughout.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None


class Layout(enum.Enum):
    """Shape of a stored tensor of a matrix ``[out, in]``."""

    WEIGHT = "[out, in]"
    GROUPS = "[out, groups]"
    COLUMN = "[out, 1]"
    CHANNELS = "[out]"
    INPUT = "[1]"
    """One value, of the inputs or the matrix."""


class Stored(NamedTuple):
    """Storage of one tensor of a matrix ``[out, in]`` in a checkpoint.

    rows, columns: how many rows or columns of ``layout`` are packed into one.
    transposed: the checkpoint has the transpose, ``[in, out]`` or ``[groups, out]``.
    """

    dtype: torch.dtype
    layout: Layout = Layout.WEIGHT
    rows: int = 1
    columns: int = 1
    transposed: bool = False

    def shape(self, out: int, inputs: int, groups: int) -> tuple[int, ...]:
        """The shape for an unpacked matrix of these sizes."""
        rows = out // self.rows
        if self.layout == Layout.INPUT:
            return (1,)
        if self.layout == Layout.CHANNELS:
            return (rows,)
        columns = {Layout.WEIGHT: inputs, Layout.GROUPS: groups, Layout.COLUMN: 1}
        shape = rows, columns[self.layout] // self.columns
        return shape[::-1] if self.transposed else shape


class Scheme:
    """Base class of quantization schemes for weights and inputs.

    Attributes:
        name: as in ``quant_model_description.json``.
        experts: whether the scheme supports experts.
        groups: whether it supports per-group scales in linear layers.
        expert_groups: whether it supports per-group scales in experts.
        offsets: whether it supports a non-zero zero_point.
        group_size: inputs per scale, where the format has only one size; 0 for others.
        packed: names of the tensors that ``pack`` returns.
        int8_rows: whether experts take rows that are already quantized to int8, dynamically by row.
        takes_rows: whether linear layers do.
    """

    name: ClassVar[str]
    experts: ClassVar[bool] = True
    groups: ClassVar[bool] = False
    expert_groups: ClassVar[bool] = False
    offsets: ClassVar[bool] = False
    group_size: ClassVar[int] = 0
    packed: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    int8_rows: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return extension.installation.SCHEME_BITS[self.name]

    def stored(self, description: Mapping[str, Any], layer: str) -> dict[str, Stored]:
        """The tensors of a layer in a ModelSlim checkpoint (msmodelslim, ``ascendv1`` format)."""
        scales = {
            name: Stored(torch.float32, Layout.GROUPS) for name in ("weight_scale", "weight_offset")
        }
        return {"weight": Stored(torch.int8)} | scales

    def read(self, given: Tensors) -> Quantized:
        """The matrix, from the tensors that :meth:`stored` names."""
        return Quantized(
            given["weight"], given["weight_scale"].float(), given["weight_offset"].float()
        )

    def load(
        self, given: Tensors, dtype: torch.dtype, layer: str, first_rank: bool
    ) -> dict[str, torch.Tensor]:
        """Convert the tensors of a linear layer in a ModelSlim checkpoint to those of the
        operators.

        Args:
            dtype: of the layer's inputs and outputs.
            layer: its name, for errors.
            first_rank: whether this rank adds the bias of an output that is reduced over ranks.

        Raises:
            RefusedError: the scheme does not support the matrix's groups or zero_point.
        """
        return self.pack(self.checked(self.read(given), layer), dtype)

    def checked(self, matrix: Quantized, layer: str) -> Quantized:
        """Check a matrix, and drop a zero_point that is 0 throughout.

        Raises:
            RefusedError: the scheme does not support the matrix's groups or zero_point.
        """
        inputs, groups = matrix.weight.shape[-1], matrix.scale.shape[-1]
        self.check_groups(inputs, groups, matrix.weight.dim() > 2, layer)
        zero_point = matrix.zero_point
        if zero_point is not None and not zero_point.any():
            zero_point = None
        if zero_point is not None and not self.offsets:
            raise RefusedError(
                f"{layer} is {self.name} with asymmetric weights (weight_offset is not 0);"
                f" {self.name} supports symmetric weights, W8A16 and W4A16 both; fix: quantize the"
                " model again"
            )
        return Quantized(matrix.weight, matrix.scale, zero_point)

    def check_size(self, out: int, inputs: int, layer: str) -> None:
        """Raise RefusedError unless the operators multiply a matrix ``[out, in]`` of this size."""
        if max(out, inputs) > MOST:
            raise RefusedError(
                f"{layer} is {self.name} with {out} outputs and {inputs} inputs on a rank; CANN"
                f" multiplies quantized matrices of up to {MOST} of each; fix: raise"
                " --tensor-parallel-size, or leave the layer unquantized"
            )

    def count_groups(self, inputs: int, group_size: int, experts: bool, layer: str) -> int:
        """Number of groups in an output channel of this number of inputs; one if ``group_size`` is
        0 or -1.

        Raises:
            RefusedError: the groups do not divide the inputs, or the scheme does not support them.
        """
        if group_size <= 0:
            return 1
        if inputs % group_size:
            raise RefusedError(
                f"{layer} is {self.name} with groups of {group_size}, which do not divide this"
                f" rank's {inputs} inputs; fix: lower"
                f" --tensor-parallel-size{', or set --enable-expert-parallel' if experts else ''}"
            )
        self.check_groups(inputs, inputs // group_size, experts, layer)
        return inputs // group_size

    def check_groups(self, inputs: int, groups: int, experts: bool, layer: str) -> None:
        """Raise RefusedError unless the scheme supports this number of groups and inputs per output
        channel."""
        if groups == 1:
            return
        if not (self.expert_groups if experts else self.groups):
            raise RefusedError(
                f"{layer} is {self.name} with {groups} scales per channel; {self.name} supports one"
                f" per channel{' in experts' if experts and self.groups else ''}; fix: quantize the"
                " model again per channel"
            )
        if inputs % groups or inputs // groups % GROUP_STEP:
            raise RefusedError(
                f"{layer} is {self.name} with {groups} scales per channel for this rank's {inputs}"
                f" inputs; group sizes that are multiples of {GROUP_STEP} are supported; fix:"
                " quantize the model again, or lower --tensor-parallel-size"
            )

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Convert a matrix to the tensors of the operators, with the names in ``packed``."""
        raise NotImplementedError

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply x ``[tokens, in]``, float16 or bfloat16, by the matrix: ``[tokens, out]`` of x's
        dtype."""
        raise NotImplementedError

    def apply_int8(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        own: Tensors,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """As :meth:`apply` for int8 rows with ``scale`` float32 ``[rows]``, if ``takes_rows``; the
        result has this dtype."""
        raise NotImplementedError

    def grouped(self, rows: torch.Tensor, own: Tensors, counts: torch.Tensor) -> torch.Tensor:
        """Multiply each expert's rows by its matrix; see
        ``ascend_platform.ops.moe.grouped.grouped_matmul``.

        With ``int8_rows`` the rows are quantized dynamically and given to :meth:`grouped_int8`.
        """
        if not self.int8_rows:
            raise NotImplementedError
        values, scale = torch_npu.npu_dynamic_quant(rows)
        return self.grouped_int8(values, scale, own, counts, rows.dtype)

    def pack_down(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """As ``pack``, for the second matrix of experts."""
        return self.pack(matrix, dtype)

    def grouped_int8(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        own: Tensors,
        counts: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """As :meth:`grouped` for int8 rows with ``scale`` float32 ``[rows]``, if ``int8_rows``; the
        result has this dtype."""
        raise NotImplementedError

    def swiglu(
        self,
        first: Tensors,
        second: Tensors,
        rows: torch.Tensor,
        counts: torch.Tensor,
        scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Apply each expert to its rows; see ``ascend_platform.ops.moe.grouped.run_experts``.

        Args:
            scale: of int8 rows; None for others.
            dtype: of the result of int8 rows.
        """
        if scale is None or dtype is None:
            gate_up = self.grouped(rows, first, counts)
        else:
            gate_up = self.grouped_int8(rows, scale, first, counts, dtype)
        return self.grouped(torch_npu.npu_swiglu(gate_up), second, counts)


def unpack_words(words: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """Unpack int32 words to int8: unsigned values, lowest bits first, minus the middle of their
    range."""
    parts = words.movedim(dim, -1).contiguous().view(torch.uint8)
    values = parts.half() if bits == 8 else _halves(parts).flatten(-2)
    return (values - 2 ** (bits - 1)).to(torch.int8).movedim(-1, dim).contiguous()


def unpack_int4_rows(pairs: torch.Tensor) -> torch.Tensor:
    """Unpack the four-bit values of int8 ``[..., rows, in]`` to int8 ``[..., 2 * rows, in]``, lower
    half first."""
    values = _halves(pairs.contiguous().view(torch.uint8)).movedim(-1, -2).flatten(-3, -2)
    return torch.where(values > 7, values - 16, values).to(torch.int8)


def _halves(parts: torch.Tensor) -> torch.Tensor:
    """The lower and the upper four bits of bytes, float16 ``[..., 2]``; the AI CPU computes
    shifts."""
    return torch.stack(((parts & 15).half(), (parts & 240).half() / 16), -1)


def pack_int4(weight: torch.Tensor) -> torch.Tensor:
    """Transpose int8 ``[..., out, in]`` and pack it to the operators' format of four-bit values,
    int32 ``[..., in, out / 8]``."""
    across = weight.transpose(-1, -2).int().contiguous()
    words = torch_npu.npu_convert_weight_to_int4pack(across.flatten(0, -2))
    return words.view(*across.shape[:-1], -1)


def transpose_int8(weight: torch.Tensor) -> torch.Tensor:
    """Transpose int8 ``[..., out, in]`` to ``[..., in, out]``, where the chip reads it faster in
    FRACTAL_NZ.

    FRACTAL_NZ has blocks of 16 by 32 values; a matrix that they do not divide keeps the base
    format. 310P takes that as a transposed view only (vllm-ascend, issue 1736).
    """
    by_row = extension.chip_family().rows_in_nz
    across = weight.transpose(-1, -2)
    stored = weight if by_row else across
    if stored.shape[-2] % 16 or stored.shape[-1] % 32 or not uses_weight_nz():
        return weight.contiguous().transpose(-1, -2) if by_row else across.contiguous()
    if by_row:  # A view's storage has other dimensions.
        return to_nz(weight.clone()).transpose(-1, -2)
    return to_nz(across)


def per_row(parameter: torch.Tensor) -> torch.Tensor:
    """Reshape a scale or zero_point ``[..., out, groups]`` to ``[..., out]`` if groups is 1, else
    to ``[..., groups, out]``."""
    if parameter.shape[-1] == 1:
        return parameter.squeeze(-1)
    return parameter.transpose(-1, -2).contiguous()
