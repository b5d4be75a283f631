# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features of LoRA that are not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_platform.config.features import Feature

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _other_lora_on_experts(config: VllmConfig) -> str:
    lora, parallel = config.lora_config, config.parallel_config
    if not lora or not config.model_config.is_moe:
        return ""
    if lora.target_modules is not None and not any(
        target.rpartition(".")[2] == "experts" for target in lora.target_modules
    ):
        return ""
    others = {
        "data parallelism, whose ranks have different adapters in a slot": (
            parallel.data_parallel_size > 1
        ),
        "--enable-eplb, which moves experts without their adapters": parallel.enable_eplb,
        "--fully-sharded-loras": lora.fully_sharded_loras,
        "--enable-moe-shared-loras": getattr(lora, "enable_moe_shared_loras", False),
    }
    return ", ".join(name for name, asked in others.items() if asked)


FEATURES = (
    Feature(
        "LoRA on experts beyond tensor and expert parallelism (--lora-target-modules without"
        " experts serves the other layers)",
        _other_lora_on_experts,
        of_model=True,
    ),
    Feature(
        "LoRA on encoder-decoder models, of which vLLM knows the adapters of the decoder's tokens"
        " only",
        lambda config: config.lora_config and config.model_config.is_encoder_decoder,
        of_model=True,
    ),
    Feature(
        "LoRA with --kv-sharing-fast-prefill, whose last layers compute some tokens only",
        lambda config: config.lora_config and config.cache_config.kv_sharing_fast_prefill,
    ),
)
