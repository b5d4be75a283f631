# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tiny random Inkling without images and audio: the published config.json in width and depth, and the
published names of tensors, beside transformers' form of its text model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "sliding_window_size": 48,
    "d_rel": 16,
    "rel_extent": 64,
    "log_scaling_n_floor": 128,
    "log_scaling_alpha": 0.1,
    "local_layer_ids": [0, 2],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "route_scale": 2.0,
    "shared_expert_sink": True,
    "logits_mup_width_multiplier": 1.5,
}
OF_TRANSFORMERS: dict[str, Any] = {
    "conv_kernel_size": 4,
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "initializer_range": 0.2,
    "max_position_embeddings": 4096,
}
PUBLISHED: dict[str, Any] = {
    "model_type": "inkling_model",
    "sconv_kernel_size": 4,
    "dense_mlp_idx": 1,
    "dense_intermediate_size": 96,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "use_embed_norm": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "use_sconv": True,
    "max_position_embeddings": 4096,
}
NAMES = (
    (r"^lm_head\.", "model.llm.unembed."),
    (r"^model\.embed_tokens\.embed_norm\.", "model.llm.embed_norm."),
    (r"^model\.embed_tokens\.", "model.llm.embed."),
    (r"^model\.(?!llm\.)", "model.llm."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".mlp_norm."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn.w\1_d."),
    (r"\.self_attn\.r_proj\.", ".attn.wr_du."),
    (r"\.self_attn\.o_proj\.", ".attn.wo_ud."),
    (r"\.self_attn\.", ".attn."),
    (r"\.attn\.wq_d\.", ".attn.wq_du."),
    (r"\.attn\.w([kv])_d\.", r".attn.w\1_dv."),
    (r"_sconv\.conv1d\.", "_sconv."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.experts\.gate_up_proj$", ".experts.w13_weight"),
    (r"\.experts\.down_proj$", ".experts.w2_weight"),
    (r"\.shared_experts\.down_proj$", ".shared_experts.shared_w2_weight"),
    (r"\.mlp\.down_proj\.", ".mlp.w2_md."),
)
"""Patterns of transformers' names, and what the published names have instead, one after another."""


def write(path: Path) -> None:
    """Write the model, and transformers' form of it into the folder ``reference``."""
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = transformers.InklingTextConfig(**TEXT, **OF_TRANSFORMERS)
    model = transformers.InklingForCausalLM(config)
    for key, weight in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in key or key.endswith("global_scale"):
            torch.nn.init.normal_(weight, mean=1.0, std=0.1)
        elif "sconv" in key:
            torch.nn.init.normal_(weight, std=0.3)
        elif key.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(weight, std=0.05)
    model.save_pretrained(path / "reference")
    save_file(published(model.state_dict()), path / "model.safetensors", {"format": "pt"})
    write_config(path)


def write_config(path: Path) -> None:
    stored = {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "torch_dtype": "bfloat16",
        "text_config": TEXT | PUBLISHED,
        "audio_config": {},
        "vision_config": {},
    }
    (path / "config.json").write_text(json.dumps(stored))


def published(weights: dict[str, Any]) -> dict[str, Any]:
    """The tensors of transformers' text model under their published names; rows of gate and up
    projections alternate."""
    import torch

    def alternating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.stack((gate, up), -2).flatten(-3, -2)

    renamed = {}
    for key, weight in weights.items():
        if key.endswith(("gate_proj.weight", "gate_proj")):
            shared = key.endswith("gate_proj")
            name = key.replace("gate_proj", "shared_w13_weight" if shared else "w13_dn")
            weight = alternating(weight, weights[key.replace("gate_proj", "up_proj")])
        elif key.endswith("gate_up_proj"):
            name, weight = key, alternating(*weight.chunk(2, 1))
        elif "up_proj" in key:
            continue
        else:
            name = key
        for pattern, by in NAMES:
            name = re.sub(pattern, by, name)
        renamed[name] = weight.contiguous()
    return renamed
