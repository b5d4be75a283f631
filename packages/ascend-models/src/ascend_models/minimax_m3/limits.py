# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Configurations of MiniMax-M3 that are refused, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_models.common import limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK_SIZE = 128
"""Keys of the model's blocks, and tokens of a block of the KV cache."""


def check(vllm_config: VllmConfig) -> None:
    """Refuse what this form of MiniMax-M3 does not support.

    Raises:
        RefusedError: all of it, in one line.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache, sparse = vllm_config.cache_config, model.hf_text_config.sparse_attention_config
    mode = vllm_config.compilation_config.cudagraph_mode.name
    block_size = cache.block_size if cache.user_specified_block_size else BLOCK_SIZE
    keys, score = sparse["sparse_block_size"], sparse.get("sparse_score_type", "max")
    asked = {
        "images and videos (--language-model-only serves text)": (
            limits.takes_media(vllm_config, "image", "video")
        ),
        "float16 (bfloat16 serves)": str(model.dtype) == "torch.float16",
        f"graphs of mode {mode} (FULL_DECODE_ONLY serves)": mode not in limits.GRAPHS,
        "vLLM's V2 model runner (vLLM 0.32 serves)": vllm_config.use_v2_model_runner,
        f"--quantization {model.quantization} (bfloat16 serves)": model.quantization is not None,
        f"--block-size {block_size} ({BLOCK_SIZE} serves)": block_size != BLOCK_SIZE,
        f"blocks of {keys} keys ({BLOCK_SIZE} serves)": keys != BLOCK_SIZE,
        f"--kv-cache-dtype {cache.cache_dtype} (auto serves)": cache.cache_dtype
        not in ("auto", str(model.dtype).removeprefix("torch.")),
        f"scores of blocks by {score} (max serves)": score != "max",
        "speculative decoding": vllm_config.speculative_config is not None,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "LoRA": vllm_config.lora_config is not None,
        "KV connectors": vllm_config.kv_transfer_config is not None,
        "--kv-offloading-size": cache.kv_offloading_size is not None,
    }
    limits.refuse("MiniMax-M3", asked)
