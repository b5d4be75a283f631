"""What the schemes of quantization have in common: a quantized matrix, its checks, and how a checkpoint stores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch_npu

from ascend_platform import extension

Tensors = Mapping[str, torch.Tensor]

GROUP_STEP = 32
"""Groups of inputs are multiples of this (npu_weight_quant_batchmatmul, antiquant_group_size)."""


class Quantized(NamedTuple):
    """One matrix, or one of each expert (``...`` is nothing, or the experts). Its values are (weight - zero_point) * scale.

    weight: int8 ``[..., out, in]``, of four-bit values too.
    scale: float32 ``[..., out, groups]``, each for in / groups neighbours of a row.
    zero_point: float32, as the scale; None is 0 throughout.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None


class Stored(NamedTuple):
    """How a checkpoint stores one tensor of a matrix ``[out, in]``.

    layout: what its columns follow: ``in``, ``groups`` of inputs, ``one`` column; or ``none`` where it has rows alone, ``input``
        where it is one number for the inputs.
    rows, columns: how many of the matrix one of its rows or columns holds, packed.
    """

    dtype: torch.dtype
    layout: str = "in"
    rows: int = 1
    columns: int = 1

    def shape(self, out: int, inputs: int, groups: int) -> tuple[int, ...]:
        if self.layout in ("none", "input"):
            return (out // self.rows,) if self.layout == "none" else (1,)
        return (out // self.rows, {"in": inputs, "groups": groups, "one": 1}[self.layout] // self.columns)


class Scheme:
    """One way to quantize matrices and inputs; a subclass is one scheme.

    Attributes:
        name: as in ``quant_model_description.json``.
        bits: of a weight.
        experts: whether experts' matrices may be of this scheme.
        groups, expert_groups: whether a row may have several scales, in linear layers and in experts.
        offsets: whether zero_point may be other than 0.
        packed: names of the tensors that ``pack`` makes.
    """

    name: ClassVar[str]
    bits: ClassVar[int] = 8
    experts: ClassVar[bool] = True
    groups: ClassVar[bool] = False
    expert_groups: ClassVar[bool] = False
    offsets: ClassVar[bool] = False
    packed: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")

    def stored(self, description: Mapping[str, Any], layer: str) -> dict[str, Stored]:
        """The tensors of a layer in a ModelSlim checkpoint (msmodelslim, ``ascendv1`` format)."""
        scales = {name: Stored(torch.float32, "groups") for name in ("weight_scale", "weight_offset")}
        return {"weight": Stored(torch.int8)} | scales

    def read(self, given: Tensors) -> Quantized:
        """The matrix of the tensors that :meth:`stored` names."""
        return Quantized(given["weight"], given["weight_scale"].float(), given["weight_offset"].float())

    def load(self, given: Tensors, dtype: torch.dtype, layer: str, first_rank: bool) -> dict[str, torch.Tensor]:
        """The tensors for the operators, from those of a linear layer in a ModelSlim checkpoint.

        Args:
            dtype: of the layer's inputs and outputs.
            layer: its name, for errors.
            first_rank: whether what is added to an output of several ranks is added by this one.

        Raises:
            RefusedError: the matrix is of a kind that the scheme does not have.
        """
        return self.pack(self.checked(self.read(given), layer), dtype)

    def checked(self, matrix: Quantized, layer: str) -> Quantized:
        """The matrix, without a zero_point that is 0 throughout.

        Raises:
            RefusedError: the matrix is of a kind that the scheme does not have.
        """
        inputs, groups, several = matrix.weight.shape[-1], matrix.scale.shape[-1], matrix.weight.dim() > 2
        self.check_groups(inputs, groups, several, layer)
        zero_point = matrix.zero_point if matrix.zero_point is not None and bool(matrix.zero_point.any()) else None
        if zero_point is not None and not self.offsets:
            raise extension.RefusedError(
                f"{layer} is {self.name} with weights that are not symmetric (weight_offset is not 0); {self.name} is served "
                "with symmetric weights, and W8A16 and W4A16 with both: quantize it again"
            )
        return Quantized(matrix.weight, matrix.scale, zero_point)

    def check_groups(self, inputs: int, groups: int, experts: bool, layer: str) -> None:
        """Raise RefusedError unless this many groups of the inputs of a row can be served."""
        if groups == 1:
            return
        if not (self.expert_groups if experts else self.groups):
            raise extension.RefusedError(
                f"{layer} is {self.name} with {groups} scales for each row; {self.name} is served with one for each row"
                f"{' of experts' if experts and self.groups else ''}: quantize it again per channel"
            )
        if inputs % groups or inputs // groups % GROUP_STEP:
            raise extension.RefusedError(
                f"{layer} is {self.name} with {groups} scales for the {inputs} inputs that this rank has of each row; groups "
                f"of a multiple of {GROUP_STEP} inputs are served: quantize it again, or lower --tensor-parallel-size"
            )

    def pack(self, matrix: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors for the operators, by the names in ``packed``."""
        raise NotImplementedError

    def apply(self, x: torch.Tensor, own: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        """x by the matrix: ``[tokens, out]`` of x's dtype, float16 or bfloat16, from x ``[tokens, in]``."""
        raise NotImplementedError

    def grouped(self, rows: torch.Tensor, own: Tensors, counts: torch.Tensor) -> torch.Tensor:
        """Each expert's rows by its matrix; see ``ascend_platform.ops.fused_moe.grouped_matmul``."""
        raise NotImplementedError

    def swiglu(self, first: Tensors, second: Tensors, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Each expert applied to its rows; see ``ascend_platform.ops.fused_moe.swiglu_experts``."""
        return self.grouped(torch_npu.npu_swiglu(self.grouped(rows, first, counts)), second, counts)


def unpack_words(words: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """int8 values of those that int32 words hold, unsigned and the lowest bits first, less the middle of their range."""
    fields = torch.stack([(words >> shift) & (2**bits - 1) for shift in range(0, 32, bits)], dim % words.dim() + 1)
    return (fields.flatten(dim % words.dim(), dim % words.dim() + 1) - 2 ** (bits - 1)).to(torch.int8)


def unpack_int4_rows(pairs: torch.Tensor) -> torch.Tensor:
    """int8 ``[..., 2 rows, in]`` of the four-bit values that int8 ``[..., rows, in]`` holds, the lower half first."""
    low, high = ((pairs.int() & 15) ^ 8) - 8, pairs.int() >> 4
    return torch.stack((low, high), -2).flatten(-3, -2).to(torch.int8)


def pack_int4(weight: torch.Tensor) -> torch.Tensor:
    """int32 ``[..., in, out / 8]``, as operators take four-bit values, of int8 ``[..., out, in]``."""
    across = weight.transpose(-1, -2).int().contiguous()
    words = torch_npu.npu_convert_weight_to_int4pack(across.flatten(0, -2))
    return words.view(*across.shape[:-1], -1)


def transpose_int8(weight: torch.Tensor) -> torch.Tensor:
    """int8 ``[..., in, out]`` of int8 ``[..., out, in]``.

    Not in FRACTAL_NZ: torch_npu keeps to the base format unless ``torch.npu.config.allow_internal_format`` is set.
    """
    return weight.transpose(-1, -2).contiguous()


def per_row(parameter: torch.Tensor) -> torch.Tensor:
    """``[..., out]`` of a scale or zero_point with one group, ``[..., groups, out]`` of one with several."""
    return parameter.squeeze(-1) if parameter.shape[-1] == 1 else parameter.transpose(-1, -2).contiguous()
