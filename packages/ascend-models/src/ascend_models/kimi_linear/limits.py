# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Configurations of Kimi-Linear that are refused, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_models.common import limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check(vllm_config: VllmConfig) -> None:
    """Refuse what this form of Kimi-Linear does not support.

    Raises:
        RefusedError: all of it, in one line.
    """
    model = vllm_config.model_config
    asked = {
        "float16 (bfloat16 serves)": str(model.dtype) == "torch.float16",
        "vLLM's V2 model runner (vLLM 0.32 serves)": vllm_config.use_v2_model_runner,
        f"--quantization {model.quantization}": model.quantization is not None,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
    }
    limits.refuse("Kimi-Linear", asked)
