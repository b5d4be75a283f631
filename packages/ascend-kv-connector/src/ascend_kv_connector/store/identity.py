# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Identity of an instance's KV cache: what its bytes depend on, in addition to what vLLM's file tier
distinguishes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ascend_transfer.checkpoint import loaded_fingerprint

HOST_SPECIFIC_KEYS = {"_name_or_path", "transformers_version"}
"""Keys of a model's configuration that may differ between machines."""


LONG_ROPE = ("longrope", "su")
"""Types of rotary embedding whose factors vLLM chooses by ``--max-model-len``
(``model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py``)."""


def computed_with(vllm_config: Any) -> dict[str, Any]:
    """Options of an engine that its KV cache depends on, in addition to the model's
    configuration."""
    model = vllm_config.model_config
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    dtype, cache = str(model.dtype).removeprefix("torch."), vllm_config.cache_config.cache_dtype
    known = {
        "quantization": model.quantization,
        "dtype": dtype,
        "cache dtype": dtype if cache == "auto" else cache,
    }
    if rope.get("rope_type", rope.get("type")) in LONG_ROPE:
        first = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", 0
        )
        known["long rope"] = model.max_model_len > first
    return known


def cache_identity(vllm_config: Any) -> dict[str, Any]:
    """Properties that determine the KV cache of a prefix, in addition to those of vLLM's own file
    tier.

    Raises:
        RefusedError: the checkpoint has changed since it began to load.
    """
    model = vllm_config.model_config
    known = model.hf_config.to_dict()
    described = json.dumps(
        {key: known[key] for key in known.keys() - HOST_SPECIFIC_KEYS}, sort_keys=True, default=str
    )
    return computed_with(vllm_config) | {
        "revision": model.revision,
        "model": hashlib.sha256(described.encode()).hexdigest(),
        "weights": loaded_fingerprint(model),
        "hashes": vllm_config.cache_config.prefix_caching_hash_algo,
    }


def identity_digest(vllm_config: Any) -> str:
    """Digest of :func:`cache_identity`."""
    known = json.dumps(cache_identity(vllm_config), sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()[:16]
