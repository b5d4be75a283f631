# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Configurations of GLM-5-next that are refused, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_models.common import limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PAGE = 128
"""Tokens that a page is a multiple of."""


def check(vllm_config: VllmConfig) -> None:
    """Refuse what this form of GLM-5-next does not support.

    Raises:
        RefusedError: all of it, in one line.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    config = model.hf_text_config
    mode = vllm_config.compilation_config.cudagraph_mode.name
    kinds = set(getattr(config, "indexer_types", None) or ()) - {"full"}
    asked = {
        "float16 (bfloat16 serves)": str(model.dtype) == "torch.float16",
        f"graphs of mode {mode} (FULL_DECODE_ONLY serves)": mode not in limits.GRAPHS,
        "vLLM's V2 model runner (vLLM 0.32 serves)": vllm_config.use_v2_model_runner,
        "images and videos (--language-model-only serves the text)": (
            limits.takes_media(vllm_config, "image", "video")
        ),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        f"--quantization {model.quantization}": model.quantization is not None,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "KV connectors": vllm_config.kv_transfer_config is not None,
        "--prefix-match-unit": vllm_config.cache_config.prefix_match_unit is not None,
        f"index_kpool of {config.index_kpool} (divisors of {PAGE} serve)": PAGE
        % config.index_kpool,
        "rotated keys (qk_rope_head_dim)": config.qk_rope_head_dim,
        f"indexer_types of {', '.join(sorted(kinds))} (full serves)": kinds,
    }
    limits.refuse("GLM-5-next", asked)
