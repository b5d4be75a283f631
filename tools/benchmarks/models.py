# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models of tools/bench: the shape of Qwen3-0.6B, narrow ones, with experts, and for drafts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
}
# Bytes of the keys and values of 128 tokens in a layer.
BLOCK = 2 * 128 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 2
NARROW = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
NARROW |= {"vocab_size": 1024}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
EXPERTS |= {"moe_intermediate_size": 768, "norm_topk_prob": True}
# of ModelSlim's quant_model_description.json
INT8_CACHE = {"model_quant_type": "C8", "kv_cache_type": "C8"}
MTP: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_nextn_predict_layers": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "tie_word_embeddings": False,
}


def write(model: Path, arguments: argparse.Namespace) -> None:
    """Write the configuration of the selected model to a directory."""
    model.mkdir()
    shape = (
        SHAPE
        | (EXPERTS if arguments.experts else {})
        | (NARROW if arguments.host or arguments.drafts else {})
    )
    shape |= {"num_hidden_layers": arguments.layers}
    if arguments.drafts == "mtp":
        # vLLM wants experts in a layer
        shape |= MTP | {"first_k_dense_replace": arguments.layers - 1}
    (model / "config.json").write_text(json.dumps(shape))
    if arguments.int8:
        parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [
            f"mlp.{part}_proj" for part in ("gate", "up", "down")
        ]
        weights = [
            f"model.layers.{layer}.{part}.weight"
            for layer in range(arguments.layers)
            for part in parts
        ]
        (model / "quant_model_description.json").write_text(
            json.dumps(INT8_CACHE | dict.fromkeys(weights, "FLOAT"))
        )
