# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Digest of a prompt, by which a decode instance recognizes the prompt that a KV cache was computed
for."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy
import torch


def prompt_digest(request: Any, tokens: int) -> str:
    """Digest of all inputs that determine the KV cache of a vLLM request's first ``tokens`` prompt
    tokens, except the model and :class:`~ascend_kv_connector.versions.Versions`.

    These are token ids, multimodal inputs, prompt embeddings, the LoRA adapter's name and the
    client's ``cache_salt``, as in vLLM's block hashes (``vllm/v1/core/kv_cache_utils.py``,
    ``generate_block_hash_extra_keys``).
    """
    lora = request.lora_request
    inputs = [
        (each.mm_position.offset, each.mm_position.length, each.identifier)
        for each in request.mm_features
    ]
    inputs = [each for each in inputs if each[0] < tokens]
    keys = [
        tokens,
        lora.lora_name if lora else None,
        request.cache_salt,
        inputs,
        (request.prompt_is_token_ids or [])[:tokens],
    ]
    digest = hashlib.sha256(json.dumps(keys).encode())
    if request.prompt_token_ids is not None:
        digest.update(numpy.asarray(request.prompt_token_ids[:tokens], dtype="<i8").tobytes())
    if request.prompt_embeds is not None:
        digest.update(
            request.prompt_embeds[:tokens].contiguous().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()[:32]
