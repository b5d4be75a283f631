# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A small model with random weights in floating-point formats of eight and four bits, as ModelSlim,
compressed-tensors, ModelOpt and FP8 checkpoints store them, for Ascend 950.

Formats are those of OCP's specifications. The chip's inputs are quantized alike in the reference.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.models import quantize
from harness.models.gpt_oss import in_mxfp4
from harness.models.quantize import Written
from harness.references.dequantized import Model
from safetensors.torch import load_file, save_file

E4M3, LARGEST, BLOCK, GROUP = torch.float8_e4m3fn, 448.0, 128, 32
CONFIG: dict[str, Any] = quantize.COMMON | {
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    # Every token goes to every expert, because quantized inputs change which ones are selected.
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
SCHEMES = {
    "W8A8FP8_DYNAMIC": ("channel", "token"),
    "FP8 tensor": ("tensor", "token"),
    "FP8 block": ("block", "columns"),
    "W8A8_MXFP8": ("mxfp8", "mxfp8"),
    "W4A8_MXFP": ("mxfp4", "mxfp8"),
    "W4A4_MXFP4": ("mxfp4", "mxfp4"),
    "W4A16_MXFP4": ("mxfp4", "none"),
}
"""Formats of weights and of inputs."""


def in_mxfp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values in e4m3, exponents of 32 inputs with an offset of 127, and the numbers; exponents are
    rounded up, so that none saturates."""
    parts = weight.float().unflatten(-1, (-1, GROUP))
    exponent = (parts.abs().amax(-1) / LARGEST).clamp_min(2.0**-127).log2().ceil()
    values = (parts / exponent.exp2().unsqueeze(-1)).to(E4M3)
    numbers = (values.float() * exponent.exp2().unsqueeze(-1)).flatten(-2)
    return values.flatten(-2), (exponent + 127).to(torch.uint8), numbers


def scaled(x: torch.Tensor, rows: int, columns: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Values in e4m3, a scale for each block of rows and columns (0: all), and the numbers."""
    size = (rows or x.shape[0], columns or x.shape[1])
    scale = torch.stack(
        [
            torch.stack([part.abs().amax() / LARGEST for part in band.split(size[1], 1)])
            for band in x.float().split(size[0], 0)
        ]
    ).clamp_min(1e-12)
    wide = scale.repeat_interleave(size[0], 0)[: x.shape[0]]
    wide = wide.repeat_interleave(size[1], 1)[:, : x.shape[1]]
    values = (x.float() / wide).to(E4M3)
    return values, scale, values.float() * wide


def flat_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes ``[out, in / 2]`` of two codes, exponents, and the numbers."""
    blocks, exponents, numbers = in_mxfp4(weight)
    return blocks.flatten(-2), exponents, numbers


WEIGHTS: dict[str, Callable[[torch.Tensor], tuple[Any, torch.Tensor, torch.Tensor]]] = {
    "channel": functools.partial(scaled, rows=1, columns=0),
    "tensor": functools.partial(scaled, rows=0, columns=0),
    "block": functools.partial(scaled, rows=BLOCK, columns=BLOCK),
    "mxfp8": in_mxfp8,
    "mxfp4": flat_mxfp4,
}


def down_to_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """Numbers of e2m1 with OCP's exponents, which let the largest ones saturate; halves go to even
    codes."""
    parts = x.unflatten(-1, (-1, GROUP))
    power = (parts.abs().amax(-1, keepdim=True).clamp_min(1e-30).log2().floor() - 2).exp2()
    near = parts / power
    step = near.abs().clamp(1, 6).log2().floor().exp2() / 2
    return (((near / step).round() * step).clamp(-6, 6) * power).flatten(-2)


INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "token": lambda x: scaled(x, 1, 0)[2],
    "columns": lambda x: scaled(x, 1, BLOCK)[2],
    "mxfp8": lambda x: in_mxfp8(x)[2],
    "mxfp4": down_to_mxfp4,
}


@dataclass(frozen=True)
class FloatSpec:
    """A scheme by its name in SCHEMES."""

    scheme: str

    def __str__(self) -> str:
        return self.scheme

    @property
    def inputs(self) -> str:
        return SCHEMES[self.scheme][1]

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs ``[..., in]`` as the operators take them."""
        return INPUTS[self.inputs](x.flatten(0, -2)).view(x.shape)


@dataclass
class FloatMatrix:
    spec: FloatSpec
    values: Any
    scale: torch.Tensor
    exact: torch.Tensor

    def numbers(self) -> torch.Tensor:
        return self.exact

    def wrong(self) -> FloatMatrix:
        """With scales that are a quarter too large."""
        return FloatMatrix(self.spec, self.values, self.scale, self.exact * 1.25)

    def stored(self, form: str) -> dict[str, torch.Tensor]:
        """The tensors in a checkpoint; channels have a column of scales."""
        weights = SCHEMES[self.spec.scheme][0]
        name, scale = "weight", self.scale
        if form == "compressed-tensors" and weights == "mxfp4":
            name = "weight_packed"
        if weights == "tensor":
            scale = scale.flatten()
        part = "weight_scale_inv" if form == "fp8" else "weight_scale"
        tensors = {name: self.values, part: scale}
        if form == "ascend" and weights == "channel":
            tensors["weight_offset"] = torch.zeros_like(scale)
        return tensors


def make(directory: Path, form: str, schemes: list[str], dtype: str = "bfloat16") -> Model:
    """Write a Qwen3-MoE whose first layer is dense, each layer with its own scheme.

    Args:
        form: ``ascend``, ``compressed-tensors``, ``modelopt``, ``fp8``, or ``online``, whose
            weights vLLM quantizes.
    """
    import transformers

    torch.manual_seed(0)
    config = CONFIG | {"num_hidden_layers": len(schemes), "mlp_only_layers": [0]}
    source, target = directory / f"{form}-{dtype}-source", directory / f"{form}-{dtype}"
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**config))
    model.to(getattr(torch, dtype)).save_pretrained(source)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(source / "model.safetensors")
    written, stored, kinds = Written({}, {}, {}, {}), {}, {}
    for name, weight in weights.items():
        base = name.removesuffix(".weight")
        layer = re.match(r"model\.layers\.(\d+)\..*_proj\.weight$", name)
        if layer is None:
            stored[name], kinds[name] = weight, "FLOAT"
            continue
        spec = FloatSpec(schemes[int(layer[1])])
        matrix = FloatMatrix(spec, *WEIGHTS[SCHEMES[spec.scheme][0]](weight.float()))
        written.matrices[base] = matrix  # type: ignore[assignment]
        if form == "online":
            stored[name] = weight
            continue
        for part, tensor in matrix.stored(form).items():
            stored[f"{base}.{part}"], kinds[f"{base}.{part}"] = tensor.contiguous(), spec.scheme
    file = "quant_model_weights.safetensors" if form == "ascend" else "model.safetensors"
    save_file(stored, target / file, {"format": "pt"})
    about = json.loads((target / "config.json").read_text())
    if form == "ascend":
        description = {"model_quant_type": schemes[0], "version": "1.0.0", "group_size": GROUP}
        (target / "quant_model_description.json").write_text(json.dumps(description | kinds))
    elif form != "online":
        about["quantization_config"] = config_of(form, schemes)
        (target / "config.json").write_text(json.dumps(about, indent=2))
    return Model("floats", source, target, dtype, written)


def config_of(form: str, schemes: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint."""
    routers = [f"model.layers.{i}.mlp.gate" for i in range(1, len(schemes))]
    if form == "fp8":
        about: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
        about |= {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        return about | {"modules_to_not_convert": ["lm_head", *routers]}
    if form == "modelopt":
        return {"quant_method": form, "quant_algo": "MXFP8", "ignore": ["lm_head", *routers]}
    return {
        "quant_method": form,
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "config_groups": {f"group_{i}": group(i, scheme) for i, scheme in enumerate(schemes)},
    }


def group(layer: int, scheme: str) -> dict[str, Any]:
    """A group of compressed-tensors' configuration."""

    def arguments(form: str, dynamic: bool) -> dict[str, Any] | None:
        if form == "none":
            return None
        about = {"type": "float", "symmetric": True, "dynamic": dynamic}
        if not form.startswith("mx"):
            return about | {"num_bits": 8, "strategy": form}
        about |= {"num_bits": int(form[-1]), "strategy": "group", "group_size": GROUP}
        return about | {"scale_dtype": "torch.uint8"}

    weights, inputs = SCHEMES[scheme]
    return {
        "targets": [rf"re:model\.layers\.{layer}\..*"],
        "weights": arguments(weights, False),
        "input_activations": arguments(inputs, True),
        "format": "mxfp4-pack-quantized" if weights == "mxfp4" else "float-quantized",
    }
