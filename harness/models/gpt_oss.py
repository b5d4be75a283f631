# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A small gpt-oss with random weights, its experts in MXFP4 as OpenAI's checkpoints store them,
beside its expanded form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Magnitudes of e2m1."""

CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,  # a rank of two has 96
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    # With fewer, an expert that bfloat16 selects differently changes too much.
    "num_experts_per_tok": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 24,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def in_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks ``[…, in / 32, 16]`` and scales ``[…, in / 32]`` of a matrix ``[…, in]``, and its
    expanded values."""
    parts = weight.unflatten(-1, (-1, 32))
    exponent = (parts.abs().amax(-1) / 6).log2().ceil()
    near = parts / exponent.exp2().unsqueeze(-1)
    level = (near.abs().unsqueeze(-1) - LEVELS).abs().argmin(-1)
    codes = (level + 8 * (near < 0)).to(torch.uint8)
    numbers = LEVELS[level] * near.sign() * exponent.exp2().unsqueeze(-1)
    return (
        codes[..., ::2] | codes[..., 1::2] << 4,
        (exponent + 127).to(torch.uint8),
        numbers.flatten(-2),
    )


def make(directory: Path) -> tuple[Path, Path]:
    """Write the model in MXFP4, and expanded."""
    import transformers

    plain, path = directory / "gpt-oss-plain", directory / "gpt-oss"
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**CONFIG))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, std=1.0 if name.endswith("sinks") else 0.1)
    model.save_pretrained(plain)
    shutil.copytree(plain, path, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(plain / "model.safetensors")
    stored = {}
    for name, weight in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [experts, in, out]
            stored[f"{name}_blocks"], stored[f"{name}_scales"], numbers = in_mxfp4(
                weight.transpose(1, 2)
            )
            weights[name] = numbers.transpose(1, 2).contiguous()
        else:
            stored[name] = weight
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    save_file(
        {name: each.contiguous() for name, each in stored.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((path / "config.json").read_text())
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    about = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": about}, indent=2))
    return path, plain
