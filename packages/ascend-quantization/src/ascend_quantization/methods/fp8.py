# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""FP8 weights (e4m3) of linear layers and experts, kept or converted at load.

Weights are loaded as bytes (uint8). Where the chip multiplies FP8 they stay as they are. Elsewhere
they are converted layer by layer when all are loaded, so that the peak memory is that of the
converted model and one layer. A converted weight is value * scale, computed in float32 and rounded
once: to the model's dtype, or to int8 with a scale per output channel (W8A8_DYNAMIC).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from ascend_platform.extension import NPUFusedMoEMethod, RefusedError
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.linear import (
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from ascend_quantization.base import Quantized, Scheme
from ascend_quantization.methods.experts import (
    CheckpointExperts,
    QuantizedExperts,
    loading,
)
from ascend_quantization.methods.linear import (
    CheckpointLinear,
    ModelSlimLinearMethod,
    Shard,
    replace,
)
from ascend_quantization.schemes import FP8_BLOCK, SCHEMES
from ascend_quantization.schemes.floats import BLOCK

INT8 = "W8A8_DYNAMIC"
CHUNK = 2**18
"""Elements converted at once, which limits temporary memory: 12 bytes each."""

Sizes = tuple[int, int]
# The default dtype is the model's while the model is created.
ones = functools.partial(torch.ones, dtype=torch.float32)


@dataclass(frozen=True)
class Fp8Format:
    """Storage of FP8 matrices ``[out, in]`` in a checkpoint.

    scale: name of the scales, float32 or e8m0.
    block: rows and columns per scale; 0 is the whole matrix. Blocks at the end may be partial.
    """

    scale: str
    block: Sizes

    def grid(self, rows: list[int], inputs: int) -> Sizes:
        """The largest block that divides this rank's matrices with these numbers of rows; shards
        need not begin at checkpoint blocks."""
        return math.gcd(self.block[0], *rows), math.gcd(self.block[1], inputs)

    @property
    def scheme(self) -> Scheme:
        """The scheme that multiplies these matrices as they are."""
        return FP8_BLOCK if min(self.block) > 1 else SCHEMES["W8A8FP8_DYNAMIC"]

    def expanded(self, scale: torch.Tensor, grid: Sizes, most: Sizes) -> torch.Tensor:
        """A matrix's scales per block of ``grid``, without those beyond ``most`` rows
        and inputs."""
        scale = scale.float()
        for dim, (stored, own, size) in enumerate(zip(self.block, grid, most, strict=True), -2):
            scale = scale.repeat_interleave(stored // own, dim)
            scale = scale.narrow(dim, 0, min(scale.shape[dim], size // own))
        return scale


def as_bytes(loaded: torch.Tensor) -> torch.Tensor:
    """A matrix of the checkpoint as uint8.

    Raises:
        RefusedError: it is not in e4m3.
    """
    if loaded.dtype != torch.float8_e4m3fn:
        raise RefusedError(
            f"the FP8 checkpoint has a matrix {list(loaded.shape)} of {loaded.dtype}, in a layer"
            " that its configuration calls FP8; fix: name the layer in quantization_config"
            " (modules_to_not_convert, or ignore)"
        )
    return loaded.view(torch.uint8)


@functools.cache
def values_of(device: torch.device) -> torch.Tensor:
    """The value of each byte in e4m3: float32 ``[256]``."""
    every = torch.arange(256, dtype=torch.uint8, device="cpu")
    return every.view(torch.float8_e4m3fn).float().to(device)


def chunks(weight: torch.Tensor, scale: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Dequantize bytes ``[out, in]``, with one scale for each of a grid of blocks; yields row
    offsets and float32 rows."""
    block = weight.shape[0] // scale.shape[0]
    step = max(CHUNK // weight.shape[1] // block, 1)
    table = values_of(weight.device)
    for first in range(0, scale.shape[0], step):
        factors = scale[first : first + step]
        rows = weight[first * block : (first + len(factors)) * block]
        values = table.index_select(0, rows.flatten().int())
        values = values.view(len(factors), block, scale.shape[1], -1)
        yield first * block, (values * factors[:, None, :, None]).view(rows.shape)


def dequantized(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix, or one per expert, rounded to ``dtype``."""
    made = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    tensors = (each.view(-1, *each.shape[-2:]) for each in (made, weight, scale))
    for matrix, bytes_, factors in zip(*tensors, strict=True):
        for first, rows in chunks(bytes_, factors):
            matrix[first : first + len(rows)] = rows
    return made


def requantized(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """The matrix, or one per expert, as int8 with a scale per output channel.

    Args:
        dtype: of the layer's inputs.

    Raises:
        RefusedError: the dtype is not supported.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise RefusedError(
            f"FP8 weights converted to {INT8} need --dtype bfloat16 or float16; the dtype is"
            f" {dtype}; fix: set one of these"
        )
    made = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(*weight.shape[:-1], 1, dtype=torch.float32, device=weight.device)
    tensors = (each.view(-1, *each.shape[-2:]) for each in (made, scales, weight, scale))
    for matrix, own, bytes_, factors in zip(*tensors, strict=True):
        for first, rows in chunks(bytes_, factors):
            least = torch.finfo(torch.float32).tiny * 127
            steps = rows.abs().amax(-1, keepdim=True).clamp_min(least) / 127
            own[first : first + len(rows)] = steps
            matrix[first : first + len(rows)] = (rows / steps).round()
    return Quantized(made, scales)


def aligned_matrix(
    form: Fp8Format, weight: torch.Tensor, scale: torch.Tensor, name: str
) -> Quantized:
    """The matrix, or one per expert, for its own scheme.

    Args:
        scale: per block of the grid that a rank loads.
        name: of the layer, for errors.

    Raises:
        RefusedError: a block of the checkpoint does not begin where one of the operator does.
    """
    out, inputs = weight.shape[-2:]
    if form.scheme is not FP8_BLOCK:
        return Quantized(weight, scale.repeat_interleave(out // scale.shape[-2], -2))
    rows, columns = out // scale.shape[-2], inputs // scale.shape[-1]
    whole = scale[..., :: BLOCK // rows, :: BLOCK // columns].contiguous()
    spread = whole.repeat_interleave(BLOCK // rows, -2).repeat_interleave(BLOCK // columns, -1)
    if not torch.equal(spread[..., : scale.shape[-2], : scale.shape[-1]], scale):
        raise RefusedError(
            f"{name} has {out} outputs and {inputs} inputs on a rank, whose FP8 blocks are not those"
            f" of {BLOCK} by {BLOCK} of npu_quant_matmul; supported: merged matrices and shards that"
            " begin with a block; fix: lower --tensor-parallel-size, set --enable-expert-parallel for"
            ' experts, or set --additional-config \'{"ascend": {"platform": {"fp8": "dequantize"}}}\''
        )
    return Quantized(weight, whole)


class Fp8Linear(CheckpointLinear):
    """Mixin that loads the FP8 weights of a linear layer."""

    fp8: Fp8Format

    def parameters(self, layer: Any, shard: Shard) -> Iterator[tuple[str, BasevLLMParameter]]:
        self.parts = shard.parts
        weight = torch.empty(shard.rows, shard.inputs, dtype=torch.uint8)
        of_weight = loading(shard.loader, as_bytes)
        options: dict[str, Any] = {"output_dim": 0, "weight_loader": of_weight}
        yield "weight", ModelWeightParameter(data=weight, input_dim=1, **options)
        options["weight_loader"] = of_scale = loading(shard.loader, torch.Tensor.float)
        scale: Any
        if self.fp8.block == (0, 0):
            scale = PerTensorScaleParameter(data=ones(len(shard.parts)), weight_loader=of_scale)
        elif self.fp8.block[1] == 0:
            scale = ChannelQuantScaleParameter(data=ones(shard.rows, 1), **options)
        else:
            grid = self.fp8.grid(shard.parts, shard.inputs)
            layer.weight_block_size = list(grid)  # Read by vLLM's loaders of merged matrices.
            convert = functools.partial(self.fp8.expanded, grid=grid, most=shard.whole)
            data = ones(shard.rows // grid[0], shard.inputs // grid[1])
            options["weight_loader"] = loading(shard.loader, convert)
            scale = BlockQuantScaleParameter(data=data, input_dim=1, **options)
        yield self.fp8.scale, scale

    def loaded(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes and their scales, at least one per row of blocks."""
        scale = getattr(layer, self.fp8.scale).data
        if self.fp8.block == (0, 0):
            block = math.gcd(*self.parts)
            counts = torch.tensor([rows // block for rows in self.parts], device=scale.device)
            scale = scale.repeat_interleave(counts).unsqueeze(1)
        return layer.weight.data, scale


@register_weight_loader_v2_supported_method
class DequantizedLinearMethod(Fp8Linear, UnquantizedLinearMethod):
    """Linear layer of an FP8 checkpoint, dequantized at load to the model's dtype."""

    def __init__(self, fp8: Fp8Format) -> None:
        super().__init__()
        self.fp8 = fp8

    def process_weights_after_loading(self, layer: Any) -> None:
        made = dequantized(*self.loaded(layer), self.dtype)
        replace(layer, ("weight", self.fp8.scale), {"weight": made})
        super().process_weights_after_loading(layer)


@register_weight_loader_v2_supported_method
class RequantizedLinearMethod(Fp8Linear, ModelSlimLinearMethod):
    """Linear layer of an FP8 checkpoint, requantized at load to W8A8_DYNAMIC."""

    def __init__(self, fp8: Fp8Format, name: str) -> None:
        super().__init__(SCHEMES[INT8], {}, name)
        self.fp8 = fp8

    def parameters(self, layer: Any, shard: Shard) -> Iterator[tuple[str, BasevLLMParameter]]:
        self.scheme.check_size(shard.rows, shard.inputs, self.name)
        return super().parameters(layer, shard)

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = self.scheme.pack(requantized(*self.loaded(layer), self.dtype), self.dtype)
        replace(layer, ("weight", self.fp8.scale), packed)


@register_weight_loader_v2_supported_method
class KeptLinearMethod(Fp8Linear, ModelSlimLinearMethod):
    """Linear layer of an FP8 checkpoint, multiplied as it is."""

    def __init__(self, fp8: Fp8Format, name: str) -> None:
        super().__init__(fp8.scheme, {}, name)
        self.fp8 = fp8

    def parameters(self, layer: Any, shard: Shard) -> Iterator[tuple[str, BasevLLMParameter]]:
        self.scheme.check_size(shard.rows, shard.inputs, self.name)
        return super().parameters(layer, shard)

    def process_weights_after_loading(self, layer: Any) -> None:
        matrix = aligned_matrix(self.fp8, *self.loaded(layer), self.name)
        replace(layer, ("weight", self.fp8.scale), self.scheme.pack(matrix, self.dtype))


class Fp8Experts(CheckpointExperts):
    """Mixin that loads the FP8 weights of experts."""

    fp8: Fp8Format
    moe: FusedMoEConfig

    def tensors(
        self, num_experts: int, rows: tuple[int, ...], inputs: int
    ) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        data: Any = torch.empty(num_experts, sum(rows), inputs, dtype=torch.uint8)
        yield "weight", data, {"convert": as_bytes}
        kind, convert = "tensor", torch.Tensor.float
        if self.fp8.block == (0, 0):
            data = ones(num_experts, len(rows)) if len(rows) > 1 else ones(num_experts)
        elif self.fp8.block[1] == 0:
            kind, data = "channel", ones(num_experts, sum(rows), 1)
        else:
            grid = self.fp8.grid(list(rows), inputs)
            kind, data = "block", ones(num_experts, sum(rows) // grid[0], inputs // grid[1])
            # Ranks of tensor parallelism have parts of the gate's and up's rows, and of down's inputs.
            ranks = self.moe.moe_parallel_config.tp_size
            most = (rows[0] * ranks, inputs) if len(rows) > 1 else (rows[0], inputs * ranks)
            convert = functools.partial(self.fp8.expanded, grid=grid, most=most)
        yield self.fp8.scale, data, {"convert": convert, "quant_method": kind}

    def loaded(self, layer: Any, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes and their scales of ``w13_`` or ``w2_``."""
        scale = getattr(layer, prefix + self.fp8.scale).data
        if scale.dim() < 3:
            scale = scale.view(len(scale), -1, 1)
        return getattr(layer, f"{prefix}weight").data, scale


class DequantizedExperts(Fp8Experts, NPUFusedMoEMethod):
    """Experts of an FP8 checkpoint, dequantized at load to the model's dtype."""

    def __init__(self, moe: FusedMoEConfig, fp8: Fp8Format) -> None:
        super().__init__(moe)
        self.fp8 = fp8

    def process_weights_after_loading(self, layer: Any) -> None:
        for prefix in ("w13_", "w2_"):
            made = dequantized(*self.loaded(layer, prefix), self.dtype)
            replace(layer, ("weight", self.fp8.scale), {"weight": made}, prefix)
        super().process_weights_after_loading(layer)


class RequantizedExperts(Fp8Experts, QuantizedExperts):
    """Experts of an FP8 checkpoint, requantized at load to W8A8_DYNAMIC."""

    def __init__(self, moe: FusedMoEConfig, fp8: Fp8Format, name: str) -> None:
        super().__init__(moe, SCHEMES[INT8], {}, lambda given: Quantized(**given), 0, name)
        self.fp8 = fp8

    def process_weights_after_loading(self, layer: Any) -> None:
        for prefix, pack in (("w13_", self.scheme.pack), ("w2_", self.scheme.pack_down)):
            packed = pack(requantized(*self.loaded(layer, prefix), self.dtype), self.dtype)
            replace(layer, ("weight", self.fp8.scale), packed, prefix)
        self.setup_experts(layer)


class KeptExperts(Fp8Experts, QuantizedExperts):
    """Experts of an FP8 checkpoint, multiplied as they are."""

    def __init__(self, moe: FusedMoEConfig, fp8: Fp8Format, name: str) -> None:
        super().__init__(moe, fp8.scheme, {}, lambda given: Quantized(**given), 0, name)
        self.fp8 = fp8

    def process_weights_after_loading(self, layer: Any) -> None:
        for prefix in ("w13_", "w2_"):
            matrix = aligned_matrix(self.fp8, *self.loaded(layer, prefix), self.name)
            packed = self.scheme.pack(matrix, self.dtype)
            replace(layer, ("weight", self.fp8.scale), packed, prefix)
        self.setup_experts(layer)
