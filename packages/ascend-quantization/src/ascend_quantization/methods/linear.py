# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Linear layers of ModelSlim, AWQ and GPTQ checkpoints: loaded through vLLM's parameters, applied
by a scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from ascend_platform.extension import RefusedError, quantized_rows
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)

from ascend_quantization.base import Layout, Quantized, Scheme, Stored, Tensors


class ScaleParameter(GroupQuantScaleParameter):
    """Scales or offsets ``[out, groups]`` whose number of groups is taken from the loaded tensor.

    The description's ``group_size`` is for the whole checkpoint, which may also have matrices with
    one scale per channel.
    """

    fitted = False

    def _fit(self, loaded: torch.Tensor, parts: int = 1) -> torch.Tensor:
        loaded = loaded.reshape(len(loaded), -1)
        groups = loaded.shape[1]
        if groups == 1:
            parts = 1
        if groups % parts or (self.fitted and self.data.shape[1] != groups // parts):
            raise RefusedError(
                f"{groups} scales per channel are not divisible by {parts} ranks, or differ from"
                f" the {self.data.shape[1]} of the other matrices of the layer; fix: lower"
                " --tensor-parallel-size, or quantize them alike"
            )
        if not self.fitted:
            self.fitted = True
            self.data = self.data.new_zeros(self.data.shape[0], groups // parts)
        return loaded

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        super().load_column_parallel_weight(self._fit(loaded_weight))

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        super().load_merged_column_weight(self._fit(loaded_weight), **kwargs)

    def load_qkv_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        super().load_qkv_weight(self._fit(loaded_weight), **kwargs)

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        loaded = self._fit(loaded_weight, self.tp_size)
        if loaded.shape[1] == 1:  # One per channel, which all ranks share.
            self.data.copy_(loaded)
        else:
            super().load_row_parallel_weight(loaded)


class Shard(NamedTuple):
    """A rank's part of a linear layer's matrix, which may be several merged ones.

    Attributes:
        parts: rows of each merged matrix on this rank.
        inputs: columns on this rank.
        whole: rows and columns on all ranks.
        loader: the layer's weight loader.
    """

    parts: list[int]
    inputs: int
    whole: tuple[int, int]
    loader: Callable[..., Any]

    @property
    def rows(self) -> int:
        return sum(self.parts)


class CheckpointLinear:
    """Mixin for quantization methods of linear layers whose weights have another form in the
    checkpoint: registers vLLM's parameters for them."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameters of :meth:`parameters`; ``params_dtype`` is the dtype of the
        layer's inputs and outputs."""
        self.dtype = params_dtype
        whole, loader = (output_size, input_size), extra_weight_attrs["weight_loader"]
        shard = Shard(output_partition_sizes, input_size_per_partition, whole, loader)
        for name, each in self.parameters(layer, shard):
            layer.register_parameter(name, each)

    def parameters(self, layer: Any, shard: Shard) -> Iterator[tuple[str, BasevLLMParameter]]:
        """Name and parameter of each tensor that is loaded."""
        raise NotImplementedError


def as_bytes(loaded: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of the checkpoint that is in float8; another tensor as it is."""
    is_float8 = loaded.is_floating_point() and loaded.element_size() == 1
    return loaded.view(torch.uint8) if is_float8 else loaded


def parameter(
    stored: Stored, rows: int, inputs: int, matrices: int, loader: Callable[..., None]
) -> BasevLLMParameter:
    """vLLM's parameter for a tensor of a linear layer, with its number of rows and of fused
    matrices."""

    def load(own: BasevLLMParameter, loaded: torch.Tensor, *arguments: Any, **named: Any) -> None:
        if loaded.dtype == torch.int64 and own.dtype == torch.float32:
            # deq_scale of float16 models has the bits of a float.
            loaded = loaded.to(torch.int32).view(torch.float32)
        loaded = as_bytes(loaded) if own.dtype == torch.uint8 else loaded
        loader(own, loaded, *arguments, **named)

    options: dict[str, Any] = {"weight_loader": load}
    if stored.layout == Layout.INPUT:
        return PerTensorScaleParameter(data=torch.zeros(matrices, dtype=stored.dtype), **options)
    data = torch.zeros(stored.shape(rows, inputs, 1), dtype=stored.dtype)
    if stored.layout in (Layout.COLUMN, Layout.CHANNELS):
        return ChannelQuantScaleParameter(data=data, output_dim=0, **options)
    if stored.layout == Layout.GROUPS:
        return ScaleParameter(data=data, output_dim=0, input_dim=1, **options)
    if stored.rows == stored.columns == 1:
        return ModelWeightParameter(data=data, output_dim=0, input_dim=1, **options)
    packed = {"packed_dim": 1, "packed_factor": stored.columns} if stored.columns > 1 else {}
    packed = packed or {"packed_dim": 0, "packed_factor": stored.rows}
    return PackedvLLMParameter(data=data, output_dim=0, input_dim=1, **packed, **options)


def replace(
    layer: torch.nn.Module, loaded: Any, packed: dict[str, torch.Tensor], prefix: str = ""
) -> None:
    """Replace a layer's loaded tensors by those of the operators."""
    for name in loaded:
        if hasattr(layer, prefix + name):
            delattr(layer, prefix + name)
    for name, tensor in packed.items():
        layer.register_parameter(prefix + name, torch.nn.Parameter(tensor, requires_grad=False))


ABSORBED = "kv_b_proj"
"""MLA's layer whose matrix latent attention takes, without a bias."""


def is_absorbed(name: str) -> bool:
    """Whether MLA takes only this layer's matrix. MiniCPM3 has such a layer without MLA."""
    config = get_current_vllm_config_or_none()
    model: Any = config and config.model_config
    return name.endswith(ABSORBED) and (model is None or model.use_mla)


def check_absorbed(scheme: str, name: str) -> None:
    """Refuse static inputs of MLA's kv_b_proj: vLLM multiplies it by ones to get its matrix, which
    their scale rounds."""
    if scheme == "W8A8" and is_absorbed(name):
        raise RefusedError(
            f"{name} is {scheme}, whose static inputs latent attention does not support; supported:"
            " W8A8_DYNAMIC, FLOAT; fix: quantize the layer again as one of these"
        )


def apply(
    scheme: Scheme, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply x ``[..., in]`` by the layer's matrix: ``[..., out]``."""
    own = {name: getattr(layer, name) for name in scheme.packed}
    if scheme.takes_rows and (rows := quantized_rows(x)):
        dtype: Any = layer.params_dtype
        return scheme.apply_int8(*rows, own, bias, dtype)
    product = scheme.apply(x.reshape(-1, x.shape[-1]), own, bias)
    return product.view(*x.shape[:-1], product.shape[-1])


@register_weight_loader_v2_supported_method
class ModelSlimLinearMethod(CheckpointLinear, LinearMethodBase):
    """Quantization method of one linear layer. ``stored`` are its tensors in the checkpoint,
    ``name`` is for errors."""

    def __init__(self, scheme: Scheme, stored: dict[str, Stored], name: str) -> None:
        self.scheme, self.stored, self.name = scheme, stored, name

    def parameters(self, layer: Any, shard: Shard) -> Iterator[tuple[str, BasevLLMParameter]]:
        self.scheme.check_size(shard.rows, shard.inputs, self.name)
        for name, stored in self.stored.items():
            yield name, self.parameter(stored, shard)

    def parameter(self, stored: Stored, shard: Shard) -> BasevLLMParameter:
        """vLLM's parameter for a tensor of the layer."""
        return parameter(stored, shard.rows, shard.inputs, len(shard.parts), shard.loader)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        given = {name: getattr(layer, name).data for name in self.stored}
        bias: Any = getattr(layer, "bias", None)
        if "quant_bias" in given and bias is not None and getattr(layer, "skip_bias_add", False):
            bias.data.zero_()  # The caller adds it, and quant_bias includes it.
        first = not isinstance(layer, RowParallelLinear) or layer.tp_rank == 0
        replace(layer, self.stored, self.scheme.load(given, self.dtype, self.name, first))

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        # With static inputs, quant_bias includes the layer's bias.
        return apply(self.scheme, layer, x, None if "quant_bias" in self.stored else bias)


def transposed_parameter(
    stored: Stored, shape: tuple[int, ...], per_channel: bool, loader: Callable[..., None]
) -> BasevLLMParameter:
    """vLLM's parameter for a transposed tensor of a linear layer, ``[in, out]`` or ``[groups,
    out]``."""
    data = torch.zeros(shape, dtype=stored.dtype)
    options: dict[str, Any] = {"data": data, "output_dim": 1, "weight_loader": loader}
    packed: dict[str, Any] = {}
    if stored.rows * stored.columns > 1:
        packed = {"packed_dim": int(stored.rows > 1), "packed_factor": stored.rows * stored.columns}
    if stored.layout == Layout.GROUPS and per_channel:  # one group, which all ranks share
        cls: Any = PackedColumnParameter if packed else ChannelQuantScaleParameter
        return cls(**options, **packed)
    cls = PackedvLLMParameter if packed else GroupQuantScaleParameter
    return cls(input_dim=0, **options, **packed)


@register_weight_loader_v2_supported_method
class TransposedLinearMethod(ModelSlimLinearMethod):
    """Quantization method of one linear layer whose matrix is transposed in the checkpoint, as in
    AWQ and GPTQ.

    Args:
        stored: the layer's tensors in the checkpoint, all transposed.
        read: converts these tensors to a matrix.
        group_size: inputs per scale; -1 for one scale per channel.
        name: of the layer, for errors.
    """

    def __init__(
        self,
        scheme: Scheme,
        stored: dict[str, Stored],
        read: Callable[[Tensors], Quantized],
        group_size: int,
        name: str,
    ) -> None:
        super().__init__(scheme, stored, name)
        self.read, self.group_size = read, group_size

    def parameter(self, stored: Stored, shard: Shard) -> BasevLLMParameter:
        groups = self.scheme.count_groups(shard.inputs, self.group_size, False, self.name)
        shape = stored.shape(shard.rows, shard.inputs, groups)
        return transposed_parameter(stored, shape, self.group_size <= 0, shard.loader)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        given = {name: getattr(layer, name).data for name in self.stored}
        matrix = self.scheme.checked(self.read(given), self.name)
        replace(layer, self.stored, self.scheme.pack(matrix, self.dtype))
