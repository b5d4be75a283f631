"""Small models with linear attention or state-space layers, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.models import registry

LINEAR = ["linear_attention"] * 3 + ["full_attention"]
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next": ("Qwen3Next", DELTA | EXPERTS | {"layer_types": LINEAR}),
    "Qwen3-Next, attention in both halves": (
        "Qwen3Next",
        DELTA | EXPERTS | {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "OLMo-hybrid": ("OlmoHybrid", DELTA | {"layer_types": LINEAR, "linear_num_value_heads": 2, "head_dim": 32}),
    "Falcon-H1": (
        "FalconH1",
        {"num_hidden_layers": 2, "head_dim": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_d_ssm": 256},
    ),
}
"""The family in Hugging Face, and its configuration besides COMMON."""


def make(name: str, directory: Path, *, drafts: bool = False) -> Path:
    """Write a model to the directory, unless it exists; with `drafts` a copy of its last layer as MTP layer.

    The first layer's decays are as Hugging Face makes them, most of them below -1; the others' are above.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    path = directory / (name + (" with drafts" if drafts else ""))
    if path.exists():
        return path
    family, special = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**(COMMON | special)))
    for key, weight in model.named_parameters():
        if key.endswith("A_log") and ".0." not in key:
            torch.nn.init.uniform_(weight, -4, -2)
    model.save_pretrained(path)
    if names := registry.RENAMED.get(model.config.model_type):
        registry._rename(path / "model.safetensors", names)
    if drafts:
        weights, size = load_file(path / "model.safetensors"), COMMON["hidden_size"]
        last = f"model.layers.{COMMON['num_hidden_layers'] - 1}."
        weights |= {key.replace(last, "mtp.layers.0."): weight.clone() for key, weight in weights.items() if key.startswith(last)}
        weights["mtp.fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)  # of embedding and hidden state
        for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            weights[f"mtp.{norm}.weight"] = torch.zeros(size)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
