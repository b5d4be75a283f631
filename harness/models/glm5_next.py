# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tiny random GLM-5-next, as it is published, with images that are not asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ARCHITECTURE = "Glm5NextForConditionalGeneration"
TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_n_heads": 32,  # With fewer, several groups may have a score of 0.
    "index_head_dim": 32,
    "index_kpool": 16,
    "index_topk": 64,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "linear_head_dim": 32,
    "linear_num_heads": 4,
    "hc_sinkhorn_iters": 4,  # The published 20 converge, so that 19 would give the same.
    "swiglu_limit": 1.0,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 128,
    "out_hidden_size": 128,
    "projection_intermediate_size": 128,
}
STORED: dict[str, Any] = {
    "indexer_rope_interleave": True,
    "mhc": True,
    "mla_use_nope": True,
    "num_nextn_predict_layers": 0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Values of the text model that vLLM reads from a published config.json, and transformers does not
have."""


def write_config(folder: Path, **changed: Any) -> None:
    """Write config.json; ``changed`` are other values of the text model's configuration."""
    stored = configuration(**changed).to_dict() | {"architectures": [ARCHITECTURE]}
    stored["text_config"] |= STORED
    (folder / "config.json").write_text(json.dumps(stored, indent=1))


def configuration(**changed: Any) -> Any:
    import transformers

    text = transformers.Glm5NextTextConfig(**TEXT | changed)
    return transformers.Glm5NextConfig(text_config=text.to_dict(), vision_config=VISION)


def write(folder: Path, seed: int = 0, **changed: Any) -> None:
    """Write config.json and weights, float32 numbers that bfloat16 has."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, ARCHITECTURE)(configuration(**changed))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            tensor.data = fill(name, tensor)
    model.save_pretrained(folder)
    write_config(folder, **changed)


def fill(name: str, tensor: Any) -> Any:
    """Random values under which each part of the model changes the answers."""
    import torch

    random = torch.randn_like(tensor)
    if name.endswith(("_hc.scale", "inv_freq")):
        random = tensor.data
    elif "norm" in name:
        random = 1 + 0.1 * random
        if name.endswith("bias"):
            random = random - 1
    elif name.endswith(("e_score_correction_bias", "A_log")):
        random = 0.3 * random
    elif not name.endswith((".base", "dt_bias", "embed_tokens.weight", "compress_ape")):
        random = 1.5 * tensor.shape[-1] ** -0.5 * random
    return random.bfloat16().float()
