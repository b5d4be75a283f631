# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A small openPangu-Ultra-MoE, for which transformers has no class: DeepSeek-V3 with more norms.

Each layer also normalizes what attention and the MLP add to the hidden states ("sandwich norm",
arXiv 2505.04519). These norms are here; all else of the reference is transformers' DeepSeek-V3,
with one group of experts and without yarn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.models.latent import REFERENCE

NAMES = {
    ".post_attention_layernorm.": ".pre_mlp_layernorm.",
    ".after_attention.": ".post_attention_layernorm.",
    ".after_mlp.": ".post_mlp_layernorm.",
    ".gate.e_score_correction_bias": ".e_score_correction_bias",
}
"""Parts of tensors' names as vLLM reads them, by those of the reference."""

PUBLISHED: dict[str, Any] = {
    "architectures": ["PanguUltraMoEForCausalLM"],
    "model_type": "pangu_ultra_moe",
    "auto_map": {"AutoConfig": "configuration_openpangu_moe.PanguUltraMoEConfig"},
    "sandwich_norm": True,
    "router_enable_expert_bias": True,
}
CODE = "configuration_openpangu_moe.py"
CONFIGURATION = """from transformers import PretrainedConfig


class PanguUltraMoEConfig(PretrainedConfig):
    model_type = "pangu_ultra_moe"
"""
"""Published checkpoints have such a class beside their files."""


def reference_class() -> Any:
    from torch import nn
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    class PanguUltraMoE(deepseek.DeepseekV3ForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                for part, name in ((layer.self_attn, "after_attention"), (layer.mlp, "after_mlp")):
                    norm = deepseek.DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
                    layer.add_module(name, norm)
                    part.register_forward_hook(_followed_by(norm))

    def _followed_by(norm: nn.Module) -> Any:
        def hook(part: nn.Module, given: Any, hidden: Any) -> Any:
            return (norm(hidden[0]), *hidden[1:]) if isinstance(hidden, tuple) else norm(hidden)

        return hook

    return PanguUltraMoE


def write(path: Path, config: Any) -> None:
    """Write a model with random weights, of a configuration of transformers' DeepSeek-V3."""
    import torch
    from safetensors.torch import load_file, save_file

    model = reference_class()(config)
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(weight, std=0.05)
        elif "norm" in name or ".after_" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(path / REFERENCE)
    weights = {}
    for name, weight in load_file(path / REFERENCE / "model.safetensors").items():
        for ours, read in NAMES.items():
            if ours in name:
                name = name.replace(ours, read)
                break
        weights[name] = weight
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    stored = json.loads((path / REFERENCE / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(stored | PUBLISHED))
    (path / CODE).write_text(CONFIGURATION)
