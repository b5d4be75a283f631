# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantize a small model for tests: write it as ModelSlim, compressed-tensors, AutoAWQ or GPTQModel
do.

No calibration is done here: the ranges of inputs and of keys and values are given. Layouts:
msmodelslim's AscendV1Saver, compressed-tensors' pack-quantized and int-quantized formats as vLLM
reads them, AutoAWQ's WQLinear_GEMM, GPTQModel's QuantLinear.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "sliding_window": None,
}
"""Configuration that all small quantized models share."""

Range = tuple[torch.Tensor, torch.Tensor]  # least and largest


@dataclass(frozen=True)
class Spec:
    """How a matrix is quantized: bits of its weights, inputs that share a scale (0: the whole row),
    and its own inputs, which are ``none``, ``dynamic`` or ``static``. ``packed`` asks for the other
    of two layouts, where a format has two; ``whole`` for one scale for the matrix."""

    bits: int
    inputs: str = "none"
    group: int = 0
    symmetric: bool = True
    packed: bool = False
    whole: bool = False

    @property
    def scheme(self) -> str:
        return (
            f"W{self.bits}A16"
            if self.inputs == "none"
            else f"W{self.bits}A8" + "_DYNAMIC" * (self.inputs == "dynamic")
        )

    def __str__(self) -> str:
        group = f"groups of {self.group}" if self.group else "per channel"
        group = "per matrix" if self.whole else group
        return (
            f"{self.scheme}"
            f" {group}{'' if self.symmetric else ', asymmetric'}{', packed' if self.packed else ''}"
        )


@dataclass
class Matrix:
    """(values - zero) * scale, values int8 ``[out, in]``, scale and zero float32 ``[out,
    groups]``."""

    spec: Spec
    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def numbers(self) -> torch.Tensor:
        values = self.values.unflatten(1, (self.scale.shape[1], -1)).double()
        return ((values - self.zero.unsqueeze(-1)) * self.scale.unsqueeze(-1)).flatten(1)


@dataclass
class Written:
    """Written tensors: the matrices by name, the scales and zeros of static inputs, and those of
    keys and values; the shifts of the inputs, which biases of norms add and others undo."""

    matrices: dict[str, Matrix]
    inputs: dict[str, Range]
    cache: dict[str, Range]
    shifts: dict[str, torch.Tensor]


def steps(
    least: torch.Tensor, highest: torch.Tensor, bits: int, symmetric: bool, dtype: torch.dtype
) -> Range:
    """Scale, exactly representable in dtype, and zero point for these ranges."""
    top = 2 ** (bits - 1) - 1
    if symmetric:
        scale = (torch.maximum(highest, -least) / top).clamp_min(1e-6).to(dtype).float()
        return scale, torch.zeros_like(scale)
    scale = (
        ((highest.clamp_min(0) - least.clamp_max(0)) / (2 * top + 1))
        .clamp_min(1e-6)
        .to(dtype)
        .float()
    )
    return scale, (-top - 1 - least.clamp_max(0) / scale).round()


def matrix(weight: torch.Tensor, spec: Spec, dtype: torch.dtype) -> Matrix:
    parts = weight.float().unflatten(1, (-1, spec.group or weight.shape[1]))
    least, highest = parts.amin(-1), parts.amax(-1)
    if spec.whole:
        least, highest = least.amin().expand_as(least), highest.amax().expand_as(highest)
    scale, zero = steps(least, highest, spec.bits, spec.symmetric, dtype)
    low, high = -(2 ** (spec.bits - 1)), 2 ** (spec.bits - 1) - 1
    values = (parts / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(low, high)
    return Matrix(spec, values.flatten(1).to(torch.int8), scale, zero)


def in_words(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack signed values into int32 along dim, with an offset to unsigned, the first in the lowest
    bits."""
    each = 32 // bits
    fields = (values.long() + 2 ** (bits - 1)).unflatten(dim, (-1, each))
    fields = fields.movedim(dim % values.dim() + 1, -1)
    words = sum(fields[..., i] << (bits * i) for i in range(each))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def in_bytes(values: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit values into int8 ``[out / 2, in]``, the even row in the lower half."""
    low, high = values[::2].int() & 15, values[1::2].int() & 15
    both = high << 4 | low
    return torch.where(both > 127, both - 256, both).to(torch.int8)


def input_steps(given: Range, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale, zero = steps(given[0].reshape(1), given[1].reshape(1), 8, False, dtype)
    return scale, zero


def of_ascend(
    stored: Matrix, bias: torch.Tensor | None, inputs: Range | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A matrix's tensors in a ModelSlim checkpoint."""
    spec = stored.spec
    if spec.inputs == "static":
        assert inputs is not None
        scale, offset = input_steps(inputs, dtype)
        factor = (stored.scale * scale).flatten()
        added = torch.zeros_like(factor) if bias is None else bias.float()
        quant_bias = (
            (added / factor - stored.values.float().sum(1) * offset).round().to(torch.int32)
        )
        bits = factor.view(torch.int32).long() if dtype == torch.float16 else factor
        return {
            "weight": stored.values,
            "quant_bias": quant_bias,
            "deq_scale": bits,
            "input_scale": scale,
            "input_offset": offset,
        }
    if spec.bits == 4 and spec.packed and spec.inputs == "none":
        shape = torch.tensor(stored.values.shape)
        return {
            "weight_packed": in_words(stored.values, 4, 1),
            "weight_scale": stored.scale,
            "weight_shape": shape,
        }
    if spec.scheme != "W4A8_DYNAMIC":
        return {"weight": stored.values, "weight_scale": stored.scale, "weight_offset": stored.zero}
    whole = stored.scale.amax(1, keepdim=True)
    sums = 8 * stored.numbers().float().sum(1, keepdim=True)
    tensors = {
        "weight": in_bytes(stored.values),
        "weight_scale": whole,
        "weight_offset": torch.zeros_like(whole),
        "scale_bias": sums,
    }
    if stored.scale.shape[1] > 1:
        tensors |= {
            "weight_scale_second": stored.scale / whole,
            "weight_offset_second": torch.zeros_like(stored.scale),
        }
    return tensors


def of_compressed(
    stored: Matrix, inputs: Range | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A matrix's tensors in a checkpoint of compressed-tensors."""
    spec, scale = stored.spec, stored.scale.to(dtype)
    if form_of(spec) == "int-quantized":
        tensors = {"weight": stored.values, "weight_scale": scale[:1, 0] if spec.whole else scale}
        if spec.inputs == "static":
            assert inputs is not None
            step, zero = input_steps(inputs, dtype)
            tensors |= {"input_scale": step, "input_zero_point": zero.to(torch.int8)}
        return tensors
    tensors = {"weight_packed": in_words(stored.values, spec.bits, 1), "weight_scale": scale}
    tensors["weight_shape"] = torch.tensor(stored.values.shape)
    if not spec.symmetric:
        tensors["weight_zero_point"] = in_words(stored.zero, spec.bits, 0)
    return tensors


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of a word from its lowest bits on (AutoAWQ, ``WQLinear_GEMM.from_linear``)."""


def words_of_columns(
    values: np.ndarray, bits: int, order: tuple[int, ...] | None = None
) -> np.ndarray:
    """Pack unsigned values ``[rows, columns]`` into 32-bit words ``[rows, columns / n]``, from the
    lowest bits on."""
    each = 32 // bits
    words = np.zeros((len(values), values.shape[1] // each), np.uint32)
    for slot, column in enumerate(order or range(each)):
        words |= values[:, column::each].astype(np.uint32) << np.uint32(bits * slot)
    return words


def of_awq(stored: Matrix, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A matrix's tensors in an AWQ checkpoint: ``[in, out]``, words along the columns."""
    values, zeros = (
        (tensor.T.numpy() + 8).astype(np.uint32) for tensor in (stored.values, stored.zero)
    )
    words = {
        "qweight": words_of_columns(values, 4, AWQ_ORDER),
        "qzeros": words_of_columns(zeros, 4, AWQ_ORDER),
    }
    return {name: torch.from_numpy(each.view(np.int32)) for name, each in words.items()} | {
        "scales": stored.scale.T.to(dtype)
    }


def of_gptq(source: Matrix, dtype: torch.dtype, *, second: bool = False) -> dict[str, torch.Tensor]:
    """A matrix's tensors in a GPTQ checkpoint: ``[in, out]``, words along the rows; ``second``: in
    format gptq_v2."""
    bits, middle = source.spec.bits, 2 ** (source.spec.bits - 1)
    values, zeros = (
        (tensor.T.numpy().astype(np.int64) + middle).astype(np.uint32)
        for tensor in (source.values, source.zero)
    )
    stored = words_of_columns(zeros, bits)
    if not second:  # GPTQModel subtracts 1 from all values of the word at once.
        stored = stored - np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    words = {"qweight": words_of_columns(values.T, bits).T.copy(), "qzeros": stored}
    groups = torch.arange(values.shape[0], dtype=torch.int32) // (
        values.shape[0] // source.scale.shape[1]
    )
    tensors = {name: torch.from_numpy(each.view(np.int32)) for name, each in words.items()}
    return tensors | {"scales": source.scale.T.to(dtype), "g_idx": groups}


def config_of(form: str, names: dict[Spec, list[str]]) -> dict[str, Any]:
    """The ``quantization_config`` of an AWQ or GPTQ checkpoint; specs after the first are GPTQ's
    rules for single layers."""

    def options(spec: Spec) -> dict[str, Any]:
        return {"bits": spec.bits, "group_size": spec.group or -1}

    first, *more_specs = names
    if form == "awq":
        assert not more_specs, "an AWQ checkpoint has one scheme"
        return options(first) | {
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": not first.symmetric,
        }
    rules: dict[str, Any] = {}
    for spec in more_specs:
        # Rules are for matrices, which vLLM may fuse.
        ends = sorted({re.sub(r"experts\.\d+", "experts.*", name) for name in names[spec]})
        patterns = [re.escape(end).replace(r"\*", r"\d+") for end in ends]
        rules |= {rf"+:{each}": options(spec) | {"sym": spec.symmetric} for each in patterns}
    more = {
        "desc_act": False,
        "sym": first.symmetric,
        "checkpoint_format": "gptq",
        "dynamic": rules,
    }
    return options(first) | {"quant_method": "gptq"} | more


def form_of(spec: Spec) -> str:
    return "pack-quantized" if spec.inputs == "none" or spec.packed else "int-quantized"


def group_of(spec: Spec, names: list[str]) -> dict[str, Any]:
    """A group of compressed-tensors' configuration."""
    strategy = (
        {"strategy": "group", "group_size": spec.group} if spec.group else {"strategy": "channel"}
    )
    strategy = {"strategy": "tensor"} if spec.whole else strategy
    weights = {
        "num_bits": spec.bits,
        "type": "int",
        "symmetric": spec.symmetric,
        "dynamic": False,
    } | strategy
    inputs = {
        "none": None,
        "dynamic": {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "dynamic": True,
            "strategy": "token",
        },
        "static": {
            "num_bits": 8,
            "type": "int",
            "symmetric": False,
            "dynamic": False,
            "strategy": "tensor",
        },
    }[spec.inputs]
    targets = set()
    for name in names:
        pattern = re.sub(r"experts\.\d+\.\w+$", "experts.*", name)
        pattern = re.sub(
            r"\.[qkv]_proj$",
            ".(q|k|v|qkv)_proj",
            re.sub(r"mlp\.(gate|up)_proj$", "mlp.(gate|up|gate_up)_proj", pattern),
        )
        targets.add(
            "re:"
            + pattern.replace(".", r"\.").replace(r"experts\.*", r"experts\..*")
            + "$" * ("experts" not in pattern)
        )
    return {
        "targets": sorted(targets),
        "weights": weights,
        "input_activations": inputs,
        "format": form_of(spec),
    }


def norm_of(name: str) -> str | None:
    """The norm whose result a matrix of a decoder layer reads."""
    match = re.fullmatch(r"(.*\.)(self_attn\.[qkv]|mlp\.(?:gate|up))_proj", name)
    norms = {"s": "input_layernorm", "m": "post_attention_layernorm"}
    return match and match[1] + norms[match[2][0]]


def quantize(
    source: Path,
    target: Path,
    form: str,
    spec_of: Callable[[str], Spec | None],
    *,
    dtype: torch.dtype,
    inputs: dict[str, Range],
    cache: dict[str, Range] | None = None,
    shifted: bool = False,
) -> Written:
    """Write ``source`` quantized to target.

    Args:
        form: ``ascend``, ``compressed-tensors``, ``awq`` or ``gptq``.
        spec_of: by a matrix's name, without ``.weight``.
        dtype: that the model will be served in.
        inputs: ranges of the inputs of matrices with static ones.
        cache: ranges ``[kv_heads * head_size]`` of keys and values, by ``<layer>.k_proj`` and
            ``.v_proj``: with an int8 cache.
        shifted: with biases of norms that shift outliers (ModelSlim's anti-outlier).
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(source / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    written = Written({}, {}, {}, {})
    kinds: dict[str, str] = {}
    names: dict[Spec, list[str]] = {}
    for name, weight in weights.items():
        base = name.removesuffix(".weight")
        spec = spec_of(base) if name.endswith(".weight") and weight.dim() == 2 else None
        if spec is None:
            stored.setdefault(name, weight.to(dtype))
            kinds.setdefault(name, "FLOAT")
            continue
        rounded = written.matrices[base] = matrix(weight, spec, dtype)
        own_inputs, bias = inputs.get(base), weights.get(f"{base}.bias")
        if shifted and (norm := norm_of(base)):
            draw = torch.Generator().manual_seed(len(norm))
            shift = torch.randn(weight.shape[1], generator=draw).mul_(0.2).to(dtype)
            stored[f"{norm}.bias"], kinds[f"{norm}.bias"] = shift, "FLOAT"
            written.shifts[base] = shift = shift.float()
            undone = rounded.numbers().float() @ shift
            bias = -undone if bias is None else bias - undone
            if own_inputs is not None:
                own_inputs = own_inputs[0] + shift.amin(), own_inputs[1] + shift.amax()
        if spec.inputs == "static":
            assert own_inputs is not None
            written.inputs[base] = input_steps(own_inputs, dtype)
        names.setdefault(spec, []).append(base)
        if form == "ascend":
            bias = None if bias is None else bias.to(dtype)
            tensors = of_ascend(rounded, bias, own_inputs, dtype)
            if bias is not None and (spec.inputs != "static" or f"{base}.bias" in weights):
                tensors["bias"] = bias
        elif form == "compressed-tensors":
            tensors = of_compressed(rounded, own_inputs, dtype)
        else:
            tensors = of_awq(rounded, dtype) if form == "awq" else of_gptq(rounded, dtype)
        stored |= {f"{base}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
        kinds |= {f"{base}.{part}": spec.scheme for part in tensors}
    for name, given in (cache or {}).items():
        scale, offset = written.cache[name] = steps(*given, 8, False, dtype)
        stored |= {f"{name}.kv_cache_scale": scale, f"{name}.kv_cache_offset": offset}
        kinds |= {f"{name}.kv_cache_{part}": "C8" for part in ("scale", "offset")}
    config = json.loads((source / "config.json").read_text()) | {
        "dtype": str(dtype).removeprefix("torch.")
    }
    if form == "ascend":
        group = max((spec.group for spec in names), default=0)
        about = {"model_quant_type": "W8A8", "version": "1.0.0", "group_size": group}
        about |= {"kv_cache_type": "C8", "kv_quant_type": "C8"} if cache else {}
        (target / "quant_model_description.json").write_text(json.dumps(about | kinds, indent=2))
        save_file(stored, target / "quant_model_weights.safetensors")
    elif form in ("awq", "gptq"):
        config["quantization_config"] = config_of(form, names)
        save_file(stored, target / "model.safetensors", {"format": "pt"})
    else:
        groups = {
            f"group_{i}": group_of(spec, under) for i, (spec, under) in enumerate(names.items())
        }
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": (
                "mixed-precision"
                if len({form_of(spec) for spec in names}) > 1
                else form_of(next(iter(names)))
            ),
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [base for base in ("lm_head",) if f"{base}.weight" in weights],
        }
        save_file(stored, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return written
