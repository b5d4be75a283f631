# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Configurations of Inkling that are refused, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_models.common import limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check(vllm_config: VllmConfig) -> None:
    """Refuse what this form of Inkling does not support.

    Raises:
        RefusedError: all of it, in one line.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = model.hf_text_config
    ranks, mode = parallel.tensor_parallel_size, vllm_config.compilation_config.cudagraph_mode.name
    heads = min(text.num_key_value_heads, text.swa_num_key_value_heads)
    towers = {"image": "vision_config", "audio": "audio_config"}
    served_by_vllm = [
        name
        for name, tower in towers.items()
        if getattr(getattr(model.hf_config, tower, None), "decoder_dmodel", None)
    ]
    asked = {
        "float16 (bfloat16 serves)": str(model.dtype) == "torch.float16",
        f"graphs of mode {mode} (FULL_DECODE_ONLY serves)": mode not in limits.GRAPHS,
        "vLLM's V2 model runner (vLLM 0.32 serves)": vllm_config.use_v2_model_runner,
        f"tensor parallelism over {ranks} NPUs (num_key_value_heads are {heads})": heads % ranks,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        'images and audio (--limit-mm-per-prompt \'{"image": 0, "audio": 0}\' serves text)': (
            limits.takes_media(vllm_config, *served_by_vllm)
        ),
        f"--quantization {model.quantization}": model.quantization is not None,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "KV connectors": vllm_config.kv_transfer_config is not None,
        "--kv-offloading-size": vllm_config.cache_config.kv_offloading_size is not None,
        "--disable-hybrid-kv-cache-manager": (
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
    }
    limits.refuse("Inkling", asked)
