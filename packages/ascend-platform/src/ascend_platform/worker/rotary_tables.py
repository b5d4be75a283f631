# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Limits of a model's rotary tables."""

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention

from ascend_platform.errors import RefusedError


def check(model: torch.nn.Module, max_model_len: int, is_drafter: bool = False) -> None:
    """Refuse a model whose attention has a cosine and sine cache with fewer rows than a request may
    have positions.

    An NPU ends the process at a position outside of the cache; vLLM takes ``--max-model-len`` from
    ``max_position_embeddings`` and the rows of YaRN's cache from
    ``original_max_position_embeddings`` and ``factor``.

    Args:
        is_drafter: for the message.

    Raises:
        RefusedError: the rows and the limit, in one line.
    """
    layers = [
        layer
        for layer in model.modules()
        if any(isinstance(each, Attention | MLAAttention) for each in layer.children())
    ]
    inner: list[Any] = [each for layer in layers for each in layer.children()]
    for layer in {id(each): each for each in inner}.values():
        rows = max_model_len
        if (cache := getattr(layer, "cos_sin_cache", None)) is not None:
            rows = cache.shape[0]
        elif getattr(layer, "use_long_rope", False):
            rows = layer.long_short_cos_sin_cache.shape[0] - layer.original_max_position_embeddings
        if rows < max_model_len:
            owner = "drafter's " if is_drafter else ""
            raise RefusedError(
                f"the {owner}rotary embedding has {rows} positions (with YaRN,"
                " original_max_position_embeddings x factor) and --max-model-len is"
                f" {max_model_len}; fix: --max-model-len {rows}, or correct the {owner}rope"
                " parameters"
            )
