# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features of attention that are not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_platform.attention import mla_prolog
from ascend_platform.config import architectures
from ascend_platform.config.features import Feature

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _other_cache_dtype(config: VllmConfig) -> str:
    dtype = config.cache_config.cache_dtype
    return "" if dtype in ("auto", str(config.model_config.dtype).split(".")[-1]) else dtype


def _shards_sparse_context(config: VllmConfig) -> bool:
    shards = config.parallel_config.decode_context_parallel_size
    return shards > 1 and architectures.has_sparse_attention(config.model_config)


def _other_image_attention(config: VllmConfig) -> bool:
    model, compared = config.model_config, ("Gemma3For", "Gemma4", "PaliGemmaFor")
    return model.is_mm_prefix_lm and not model.architecture.startswith(compared)


def _shards_image_context(config: VllmConfig) -> bool:
    shards = config.parallel_config.decode_context_parallel_size
    return shards > 1 and config.model_config.is_mm_prefix_lm


FEATURES = (
    Feature("KV cache dtypes other than the model's", _other_cache_dtype, of_model=True),
    Feature(
        "decode context parallelism with sparse latent attention (DSA), whose operator has no"
        " log-sum-exp over pages",
        _shards_sparse_context,
        of_model=True,
    ),
    Feature(
        "bidirectional attention between the tokens of an image beyond those of Gemma 3, Gemma 4 and"
        " PaliGemma (--limit-mm-per-prompt '{\"image\": 0}' serves the text model)",
        _other_image_attention,
        of_model=True,
    ),
    Feature(
        "decode context parallelism with bidirectional attention between the tokens of an image",
        _shards_image_context,
        of_model=True,
    ),
)


def check(vllm_config: VllmConfig) -> None:
    """Check the options of attention.

    Raises:
        RefusedError: what was found and what is supported, in one line.
    """
    mla_prolog.check(vllm_config)
