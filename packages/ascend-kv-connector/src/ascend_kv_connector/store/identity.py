# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Identity of an instance's KV cache: what its bytes depend on, in addition to what vLLM's file tier
distinguishes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ascend_platform.transfer.checkpoint import loaded_fingerprint

HOST_SPECIFIC_KEYS = {"_name_or_path", "transformers_version"}
"""Keys of a model's configuration that may differ between machines."""


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
    return {
        "revision": model.revision,
        "quantization": model.quantization,
        "model": hashlib.sha256(described.encode()).hexdigest(),
        "weights": loaded_fingerprint(model),
        "hashes": vllm_config.cache_config.prefix_caching_hash_algo,
    }


def identity_digest(vllm_config: Any) -> str:
    """Digest of :func:`cache_identity`."""
    known = json.dumps(cache_identity(vllm_config), sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()[:16]
