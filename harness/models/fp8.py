# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Small models with random weights in FP8, as DeepSeek-V3 and compressed-tensors store them, beside
their dequantized form."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from harness.models import quantize
from safetensors.torch import load_file, save_file

BLOCK = 128
LARGEST = 448.0
"""Of e4m3."""

COMMON: dict[str, Any] = quantize.COMMON | {
    "intermediate_size": 320,  # Neither this size nor its half is a multiple of the block.
    "moe_intermediate_size": 192,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "num_hidden_layers": 3,
    "initializer_range": 0.08,
}
LEFT_OUT = {
    "Qwen3Moe": ("mlp.gate",),
    "Qwen3Next": (
        "mlp.gate",
        "mlp.shared_expert_gate",
        "linear_attn.conv1d",
        "linear_attn.in_proj_ba",
    ),
}
"""Modules that published checkpoints of a family leave in bfloat16."""
STRATEGIES = ("block", "channel", "tensor")
"""Of compressed-tensors; each layer of the model has one."""


def in_blocks(
    weight: torch.Tensor, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix in e4m3, its scales for blocks of this size, and its dequantized values, value *
    scale in float32."""
    out, inputs = weight.shape
    scale = torch.empty(-(-out // rows), -(-inputs // columns))
    stored, numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[part].abs().max() / LARGEST
            stored[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
            numbers[part] = stored[part].float() * scale[i, j]
    return stored, scale, numbers


def size_of(strategy: str, weight: torch.Tensor) -> tuple[int, int]:
    return {
        "block": (BLOCK, BLOCK),
        "channel": (1, weight.shape[1]),
        "tensor": (weight.shape[0], weight.shape[1]),
    }[strategy]


def make(directory: Path, form: str, family: str = "Qwen3Moe", **special: Any) -> tuple[Path, Path]:
    """Write a Qwen3-MoE, whose first layer is dense, and its dequantized form; ``form``: ``fp8`` or
    ``compressed-tensors``.

    With ``Qwen3Next`` as the family, the projections of linear attention are in FP8, except those
    of decays and strengths.
    """
    import transformers

    plain, path = directory / f"{form}-plain", directory / form
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model_class(model_class.config_class(**(COMMON | special))).save_pretrained(plain)
    shutil.copytree(plain, path, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2 or not re.search(r"(_proj|in_proj_qkvz)\.weight$", name):
            stored[name] = weight
            continue
        strategy = "block" if form == "fp8" else STRATEGIES[int(name.split(".")[2])]
        stored[name], scale, weights[name] = in_blocks(weight, *size_of(strategy, weight))
        if form == "fp8":
            stored[f"{name}_scale_inv"] = scale
        else:
            stored[f"{name}_scale"] = scale.flatten() if strategy == "tensor" else scale
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    if form == "fp8":
        about: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
        }
        about["weight_block_size"] = [BLOCK, BLOCK]
        layers = range(config["num_hidden_layers"])
        about["modules_to_not_convert"] = [
            "lm_head",
            *(f"model.layers.{i}.{name}" for i in layers for name in LEFT_OUT[family]),
        ]
    else:
        about = {
            "quant_method": form,
            "format": "float-quantized",
            "quantization_status": "compressed",
        }
        about |= {"ignore": ["lm_head", r"re:.*mlp\.gate$"]}
        about["config_groups"] = {
            f"group_{i}": group(i, strategy) for i, strategy in enumerate(STRATEGIES)
        }
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": about}, indent=2))
    return path, plain


def group(layer: int, strategy: str) -> dict[str, Any]:
    """A group of compressed-tensors' configuration."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": strategy,
    }
    weights |= {"block_structure": [BLOCK, BLOCK]} if strategy == "block" else {}
    inputs = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": True,
        "strategy": "token",
    }
    return {
        "targets": [rf"re:model\.layers\.{layer}\..*"],
        "weights": weights,
        "input_activations": inputs,
    }
