# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Small models with linear attention or state-space layers, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.models import glm5_next, registry

LINEAR = ["linear_attention"] * 3 + ["full_attention"]
HALVES = ", attention in both halves"
IN_BOTH_HALVES = {"layer_types": ["linear_attention", "full_attention"] * 2}
"""Each of two pipeline stages has states and attention."""
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
FLOAT32_STATES = {"mamba_ssm_dtype": "float32"}
"""As published checkpoints of Qwen3.5 have it."""
HEADS_OF_64 = {"head_dim": 64}
TIED = {"tie_word_embeddings": True}
"""vLLM has LFM2 so whatever the configuration says."""
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
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
    "OLMo-hybrid": (
        "OlmoHybrid",
        DELTA | {"layer_types": LINEAR, "linear_num_value_heads": 2, "head_dim": 32},
    ),
    "Falcon-H1": ("FalconH1", {"num_hidden_layers": 2, "mamba_d_ssm": 256} | HEADS_OF_64),
    "Kimi-Linear": ("KimiLinear", {"layer_types": LINEAR}),
    "Qwen3.5": ("Qwen3_5", DELTA | FLOAT32_STATES | {"layer_types": LINEAR}),
    "Qwen3.5-MoE": ("Qwen3_5Moe", DELTA | EXPERTS | FLOAT32_STATES | {"layer_types": LINEAR}),
    "Nemotron-H": (
        "NemotronH",
        HEADS_OF_64 | {"layer_types": ["linear_attention", "moe", "full_attention", "mlp"]},
    ),
    "Granite 4": ("GraniteMoeHybrid", {}),
    "Jamba": ("Jamba", {}),
    "LFM2": ("Lfm2", TIED),
    "LFM2-MoE": ("Lfm2Moe", TIED),
    "Mamba": ("Mamba", {}),
    "Falcon-Mamba": ("FalconMamba", {}),
    "Mamba 2": ("Mamba2", {}),
}
"""The family in Hugging Face, and its configuration besides COMMON and what registry.py has for it.
"""
PUBLISHED = "GLM-5-next"
"""The one that is written as it is published, by glm5_next.py."""
MODELS |= {
    f"{name}{HALVES}": (family, special | IN_BOTH_HALVES)
    for name, (family, special) in MODELS.items()
    if special.get("layer_types") == LINEAR
} | {
    f"Nemotron-H{HALVES}": (
        "NemotronH",
        HEADS_OF_64
        | {
            "num_hidden_layers": 6,
            "layer_types": ["linear_attention", "full_attention", "moe"] * 2,
        },
    ),
    # and experts, without which vLLM fails
    f"LFM2-MoE{HALVES}": ("Lfm2Moe", TIED | {"num_dense_layers": 1}),
}


def make(name: str, directory: Path, *, drafts: bool = False) -> Path:
    """Write a model to the directory, unless it exists; with `drafts` a copy of its last layer as
    MTP layer.

    The first layer's decays are as Hugging Face makes them, most of them below -1; the others' are
    above.
    """
    import torch
    import transformers

    path = directory / (name + (" with drafts" if drafts else ""))
    if path.exists():
        return path
    if name == PUBLISHED:
        glm5_next.write(path)
        return path
    family, special = MODELS[name]
    model_class = getattr(transformers, f"{family}ForCausalLM")
    default = model_class.config_class()
    known = {
        key: value for key, value in (registry.SIZES | COMMON).items() if key in default.to_dict()
    }
    torch.manual_seed(0)
    model = model_class(
        model_class.config_class(**(known | registry.SPECIAL.get(default.model_type, {}) | special))
    )
    for key, weight in (*model.named_parameters(), *model.named_buffers()):
        if key.endswith("A_log") and ".0." not in key:
            torch.nn.init.uniform_(weight, -4, -2)
        elif key.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(weight, std=0.05)
    model.save_pretrained(path)
    stored = json.loads((path / "config.json").read_text())
    stored |= registry.STORED.get(default.model_type, {})
    if linear := stored.get("linear_attn_config"):
        types = stored["layer_types"]
        for kind, key in {"linear": "kda_layers", "full": "full_attn_layers"}.items():
            linear[key] = [i for i, each in enumerate(types, 1) if each == f"{kind}_attention"]
    (path / "config.json").write_text(json.dumps(stored))
    if names := registry.RENAMED.get(model.config.model_type):
        registry._rename(path / "model.safetensors", names)
    if drafts:
        add_drafts(path, f"model.layers.{COMMON['num_hidden_layers'] - 1}.")
    return path


def add_drafts(path: Path, last: str) -> None:
    """Add a copy of the model's last layer, whose names begin with this, as MTP layer."""
    import torch
    from safetensors.torch import load_file, save_file

    weights, size = load_file(path / "model.safetensors"), COMMON["hidden_size"]
    weights |= {
        key.replace(last, "mtp.layers.0."): weight.clone()
        for key, weight in weights.items()
        if key.startswith(last)
    }
    # of embedding and hidden state
    weights["mtp.fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{norm}.weight"] = torch.zeros(size)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
