# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tiny random MiniMax-M3: the published layout of config.json and names of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOTH, SPARSE = [0, 1, 1], [1, 1]
"""Layers with selected blocks and experts; others are dense."""
CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "image_token_index": 250,
    "video_token_index": 251,
    "projector_hidden_size": 128,
    "torch_dtype": "bfloat16",
    "text_config": {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dense_intermediate_size": 128,
        "head_dim": 128,
        "hidden_act": "swigluoai",
        "hidden_size": 128,
        "intermediate_size": 64,
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_mtp_modules": 0,
        "partial_rotary_factor": 0.5,
        "qk_norm_type": "per_head",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 64,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 2,
            "sparse_topk_blocks": 3,
            "sparse_block_size": 128,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
        },
        "swiglu_alpha": 1.702,
        "swiglu_limit": 1.0,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 256,
    },
    "vision_config": {
        "hidden_size": 64,
        "image_size": 56,
        "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
        "intermediate_size": 128,
        "layer_norm_eps": 1e-5,
        "num_attention_heads": 2,
        "num_channels": 3,
        "num_hidden_layers": 1,
        "patch_size": 14,
        "rope_theta": 10000.0,
    },
}


def write_config(folder: Path, layers: list[int] = BOTH) -> None:
    """Write config.json; ``layers`` has 1 for each layer with selected blocks and experts."""
    folder.mkdir(parents=True, exist_ok=True)
    text = CONFIG["text_config"] | {"num_hidden_layers": len(layers), "moe_layer_freq": layers}
    of_layers = {"sparse_attention_freq": layers, "sparse_disable_index_value": layers}
    text["sparse_attention_config"] = text["sparse_attention_config"] | of_layers
    (folder / "config.json").write_text(json.dumps(CONFIG | {"text_config": text}, indent=1))


def reference(folder: Path, dtype: Any) -> Any:
    """transformers' model."""
    import transformers

    kind = transformers.MiniMaxM3SparseForConditionalGeneration
    return kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def write(folder: Path, layers: list[int] = BOTH, seed: int = 0) -> None:
    """Write config.json and weights, float32 numbers that bfloat16 has; ``layers`` as in
    :func:`write_config`."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    write_config(folder, layers)
    torch.manual_seed(seed)
    config = transformers.MiniMaxM3VLConfig.from_pretrained(folder)
    model = transformers.MiniMaxM3SparseForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not name.endswith("inv_freq"):
                tensor.copy_(fill(name, tensor))
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {published(name, layers): each for name, each in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    write_config(folder, layers)


def published(name: str, layers: list[int]) -> str:
    """The published name of a tensor; transformers writes dense layers as if they had experts."""
    for layer, has_experts in enumerate(layers):
        if not has_experts:
            name = name.replace(f".layers.{layer}.block_sparse_moe.", f".layers.{layer}.mlp.")
    return name


def fill(name: str, tensor: Any) -> Any:
    """Random values under which each part of the model changes the answers."""
    import torch

    random = torch.randn_like(tensor)
    if "norm" in name:
        random = 0.1 * random
    elif name.endswith("e_score_correction_bias"):
        random = 0.3 * random
    elif not name.endswith("embed_tokens.weight"):
        random = 1.5 * tensor.shape[-1] ** -0.5 * random
    return random.bfloat16().float()
