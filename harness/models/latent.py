# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Small models with multi-head latent attention: the widths of heads are the real ones, the rest is
small."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

REFERENCE = "transformers"
"""Directory of the reference's files where they are others than those that vLLM reads."""

WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
}
ALL: dict[str, Any] = WIDTHS | EXPERTS | {"num_key_value_heads": 4, "tie_word_embeddings": False}
BIASED: dict[str, Any] = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}  # Values of the published files, which Hugging Face has in its class.
GROUPS: dict[str, Any] = BIASED | {
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
INDEXER = {"index_topk": 32, "index_n_heads": 32, "index_head_dim": 128}
"""With many heads, no score is the sum of nothing but zeros, which several keys would share."""
OTHER_WIDTHS = {
    "kv_lora_rank": 96,
    "head_dim": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 48,
    "v_head_dim": 80,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2, groups of experts": (
        "DeepseekV2",
        ALL
        | {
            "q_lora_rank": 96,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN,
        }
        | {"routed_scaling_factor": 2.0, "norm_topk_prob": False},
    ),
    "deepseek-v2-lite, no latent query": (
        "DeepseekV2",
        ALL
        | {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v3, yarn": (
        "DeepseekV3",
        ALL | GROUPS | {"q_lora_rank": 96, "rope_parameters": YARN},
    ),
    "deepseek-v3, mla_prolog": (  # sizes that the operator takes
        "DeepseekV3",
        ALL
        | GROUPS
        | {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 2,
            "hidden_size": 6144,
            "q_lora_rank": 1536,
            "rope_parameters": YARN,
        }
        | {"initializer_range": 0.02},
    ),
    "kimi-k2, one group": (
        "DeepseekV3",
        ALL
        | BIASED
        | {"q_lora_rank": 96, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.8},
    ),
    "openpangu, sandwich norms": (
        "PanguUltraMoE",
        ALL
        | {
            "q_lora_rank": 96,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "glm-4.7-flash, 6 heads": (
        "Glm4MoeLite",
        ALL
        | BIASED
        | {
            "q_lora_rank": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        }
        | {
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "glm-4.7-flash, 20 heads": (
        "Glm4MoeLite",
        ALL
        | BIASED
        | {
            "q_lora_rank": 96,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        }
        | {
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "deepseek-v3.2, selected tokens": (
        "DeepseekV32",
        ALL | GROUPS | INDEXER | {"q_lora_rank": 96, "rope_parameters": YARN},
    ),
    "glm-5, shared selections": (
        "GlmMoeDsa",
        ALL
        | BIASED
        | INDEXER
        | {
            "num_hidden_layers": 4,
            "q_lora_rank": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
        }
        | {
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "index_topk_freq": 2,
            "indexer_rope_interleave": True,
        },
    ),
    "longcat-flash, identities among experts": (
        "LongcatFlash",
        ALL
        | {
            "num_hidden_layers": 4,
            "q_lora_rank": 96,
            "moe_topk": 3,
            "zero_expert_num": 4,
            "zero_expert_type": "identity",
        }
        | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "routed_scaling_factor": 2.5},
    ),
    "deepseek-v3, other widths": ("DeepseekV3", ALL | GROUPS | OTHER_WIDTHS | {"q_lora_rank": 64}),
}
"""Families of Hugging Face's, and their configuration besides that of other small models."""


def write_longcat(model: Any, path: Path) -> None:
    """Write a LongCat-Flash as published, and with the weights that transformers has for experts
    without weights in REFERENCE."""
    model.save_pretrained(path / REFERENCE)
    shutil.copytree(path / REFERENCE, path, dirs_exist_ok=True)
    remove_identities(path / "model.safetensors")


def remove_identities(file: Path) -> None:
    """Remove what transformers writes for LongCat's experts without weights, which have no
    ``down_proj``."""
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    kept = {
        name: each
        for name, each in weights.items()
        if re.sub("gate_proj|up_proj", "down_proj", name) in weights
    }
    save_file(kept, file, {"format": "pt"})
