# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Configurations of DeepSeek-V4 that are refused, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_models.common import limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PUBLISHED = "deepseek_v4_fp8"
"""vLLM's name of the published checkpoints' format."""
RATIOS = {0, 1, 4, 128}


def check(vllm_config: VllmConfig) -> None:
    """Refuse what this form of DeepSeek-V4 does not support.

    Raises:
        RefusedError: all of it, in one line.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    config = model.hf_config
    mode = vllm_config.compilation_config.cudagraph_mode.name
    ranks = parallel.tensor_parallel_size
    ratios = set(config.compress_ratios[: config.num_hidden_layers])
    drafter = vllm_config.speculative_config and vllm_config.speculative_config.method
    of_drafter = config.compress_ratios[config.num_hidden_layers :]
    asked = {
        "float16 (bfloat16 serves)": str(model.dtype) == "torch.float16",
        f"graphs of mode {mode} (FULL_DECODE_ONLY serves)": mode not in limits.GRAPHS,
        "vLLM's V2 model runner (vLLM 0.32 serves)": vllm_config.use_v2_model_runner,
        f"tensor parallelism over {ranks} NPUs (o_groups are {config.o_groups})": (
            config.o_groups % ranks
        ),
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        f"--quantization {model.quantization} (bfloat16, or FP8 with MXFP4 experts as published)": (
            model.quantization not in (None, PUBLISHED)
        ),
        f"drafts by {drafter} (mtp serves)": drafter not in (None, "mtp"),
        "MTP layers with compression": drafter == "mtp" and any(each > 1 for each in of_drafter),
        "LoRA": vllm_config.lora_config is not None,
        "KV connectors": vllm_config.kv_transfer_config is not None,
        "--kv-offloading-size": vllm_config.cache_config.kv_offloading_size is not None,
        "--disable-hybrid-kv-cache-manager": (
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
        f"compression by {sorted(ratios - RATIOS)}": ratios - RATIOS,
    }
    limits.refuse("DeepSeek-V4", asked)
