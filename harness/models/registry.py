# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tiny random models of the text architectures that vLLM's registry and transformers have in
common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.models import latent
from harness.models.sound_families import FAMILIES

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 256),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"),
        1024,
    ),
    **dict.fromkeys(("initializer_range", "init_std"), 0.1),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 64
    ),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(
        (
            "n_group",
            "topk_group",
            "n_shared_experts",
            "first_k_dense_replace",
            "num_shared_experts",
        ),
        1,
    ),
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "kv_lora_rank": 512,  # The operators of latent attention require these sizes.
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_topk": 16,
    "index_n_heads": 32,  # With fewer, several keys may have a score of 0.
    "index_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "ssm_state_size": 16,
}
"""Values of a configuration, by name; those that a family has are set."""

SPECIAL: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "laurel_rank": 16,
        "hidden_size_per_layer_input": 32,
        "intermediate_size": 256,
    }
    | {
        "activation_sparsity_pattern": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 32,
        "global_head_dim": 64,
    }
    | {"enable_moe_block": True, "top_k_experts": 2},
    "dbrx": {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 64}}
    | {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for name, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
        },
    },
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64}
    | {"indexer_budget": 64, "indexer_compress_ratio": 4},
    "gpt2": {"n_inner": None},
    "gptj": {"rotary_dim": 16, "n_inner": None},
    "falcon": {"num_kv_heads": 4, "multi_query": False, "ffn_hidden_size": 512},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    # Otherwise transformers splits the convolution's weights wrongly when it saves.
    "olmo_hybrid": {"linear_num_value_heads": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    # The norm of transformers has no groups.
    "mamba2": {"num_heads": 4, "head_dim": 64, "n_groups": 1},
    "nemotron_h": {
        "n_groups": 2,
        "mamba_head_dim": 64,
        "layer_types": ["linear_attention", "mlp", "full_attention", "mlp"],
    },
    "zamba2": {
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
    },
    "phimoe": {"lm_head_bias": True, "attention_bias": True},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "hy_v3": {"qk_norm": True},
    "glm4_moe": {"head_dim": 64},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "opt": {"word_embed_proj_dim": 128},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2},
    "llama4_text": {
        "num_experts_per_tok": 1,  # Router weights multiply the experts' inputs.
        "intermediate_size_mlp": 256,
        "attention_chunk_size": 128,
        "no_rope_layers": [1, 1, 1, 0],
    },
}
"""Values of single families."""

STORED: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v32": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm_moe_dsa": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "indexer_rope_interleave": True,
    },
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
    },
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True},
    "kimi_linear": {
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 128,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "moe_renormalize": True,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
    },
    "lfm2": {"block_dim": 128, "conv_dim": 128, "block_ff_dim": 256},
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1]}
    | {
        "layernorm_epsilon": 1e-5,
        "swa_head_dim": 64,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "add_swa_attention_sink_bias": True,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    }
    | {"sliding_window_size": 24, "swa_v_head_dim": 128, "attention_bias": False},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    # The least step. Transformers uses this instead of the configuration's time_step_limit, which
    # is 0 or more, and vLLM has no limit.
    "nemotron_h": {"time_step_min": 1e-30},
}
"""Values that published checkpoints have in config.json, that vLLM reads, and transformers' class
does not, or otherwise."""

ENGINES: dict[str, dict[str, Any]] = {
    # vLLM does not split its prompts, and waits forever with one of more tokens.
    "hrm_text": {"max_num_batched_tokens": 256},
}
"""Options of the engine."""

RENAMED = {
    "kimi_linear": {"layers.0.block_sparse_moe.": "layers.0.mlp."},
    "olmo_hybrid": {
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
}
"""Names of tensors in published checkpoints, as vLLM reads them, by the names that transformers
writes."""

WINDOW = 24

PUBLISHED = {
    "IQuestCoderForCausalLM": "llama",
    "InternLM3ForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "TeleChat3ForCausalLM": "llama",
    "MiMoForCausalLM": "qwen2",
    "ExaoneMoEForCausalLM": "exaone_moe",
    "PhiMoEForCausalLM": "phimoe",
    "Rnj1ForCausalLM": "gemma3_text",
    "Step1ForCausalLM": "llama",
    "LightOnOCRForConditionalGeneration": "lighton_ocr",
    "Qwen2_5OmniModel": "qwen2_5_omni",
}
"""Model types of transformers with the layers of an architecture that has another name there."""


OF_ARCHITECTURE: dict[str, dict[str, Any]] = {
    # Its other layers attend in chunks, which vLLM has for Triton only.
    "Rnj1ForCausalLM": {"layer_types": ["full_attention"] * 4},
    # vLLM divides the hidden size by the heads.
    "Step1ForCausalLM": {"head_dim": 32},
}
"""Values of the configuration for an architecture of :data:`PUBLISHED`."""


def families() -> dict[str, str]:
    """Architectures of vLLM's registry that can be built here, with the model type: of text
    generation those that transformers has, with images or sounds those of FAMILIES."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    architectures = {
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind]: kind for kind in FAMILIES
    } | PUBLISHED
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            if name in _TEXT_GENERATION_MODELS:
                architectures[name] = kind  # The last one, such as llama4_text after llama4.
    architectures = {name: kind for name, kind in architectures.items() if name in _every()}
    return dict(sorted(architectures.items(), key=lambda each: each[0].lower()))


def _every() -> dict[str, Any]:
    """vLLM's architectures of text generation, with media or without."""
    from vllm.model_executor.models import registry

    return registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS


def not_built() -> dict[str, str]:
    """Architectures of vLLM's registry that are not built here, with the cause where it is one of
    transformers': it has no class of this name."""
    import transformers

    return {
        name: "" if hasattr(transformers, name) else "transformers has no class of this name"
        for name in sorted(set(_every()) - set(families()), key=str.lower)
    }


def name_published(path: Path, architecture: str) -> None:
    """Give a model that transformers has written the architecture's published name."""
    if architecture in PUBLISHED:
        stored = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(stored | {"architectures": [architecture]}))


def _rename(path: Path, names: dict[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    renamed = {}
    for name, tensor in load_file(path).items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    save_file(renamed, path, {"format": "pt"})


def give_square_roots(model: Any) -> None:
    """Let a Llama of transformers attend by ALiBi with square roots of the distance instead of
    rotations, like Step-1."""
    import torch

    heads = model.config.num_attention_heads
    slopes = (2.0 ** (-8 / heads)) ** torch.arange(1, heads + 1)
    rotate, forward = model.model.rotary_emb.forward, model.model.forward

    def unrotated(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rotate(*args, **kwargs)
        return torch.ones_like(cos), torch.zeros_like(sin)

    def biased(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        positions = torch.arange(input_ids.shape[1])
        distance = (positions[:, None] - positions).float()
        bias = -slopes.view(-1, 1, 1) * distance.clamp(min=0).sqrt()
        bias = bias.masked_fill(distance < 0, torch.finfo(torch.float32).min)
        return forward(input_ids, **(kwargs | {"attention_mask": bias[None]}))

    model.model.rotary_emb.forward, model.model.forward = unrotated, biased


def write(kind: str, path: Path, **values: Any) -> None:
    """Write a model of a type with random weights; values are of the configuration."""
    import torch
    import transformers

    default = transformers.AutoConfig.for_model(kind)
    known = default.to_dict()
    chosen = {name: value for name, value in SIZES.items() if name in known}
    if known.get("sliding_window"):
        chosen["sliding_window"] = WINDOW
    if "kv_lora_rank" in known:
        # as latent attention has in transformers
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(chosen | SPECIAL.get(kind, {}) | values))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if (
            name.endswith(("sinks", "bias", "e_score_correction_bias"))
            and weight.is_floating_point()
        ):
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(path)
    if renamed := RENAMED.get(kind):
        _rename(path / "model.safetensors", renamed)
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(stored | STORED.get(kind, {})))


def publish(kind: str, path: Path) -> None:
    """Change the weights to those that published checkpoints have, where transformers writes
    others."""
    import torch
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    if kind == "axk1":  # The dense layer also has this norm, which is unused.
        norm = {"model.layers.0.post_mlp_layernorm.weight": torch.ones(SIZES["hidden_size"])}
        save_file(load_file(file) | norm, file, {"format": "pt"})
    if kind == "longcat_flash":
        latent.remove_identities(file)
