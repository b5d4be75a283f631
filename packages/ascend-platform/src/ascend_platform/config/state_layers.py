# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models with linear attention or state-space layers: which are served."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SERVED = {
    "Qwen3NextForCausalLM": "gated delta net",
    "Qwen3NextMTP": "gated delta net",
    "Qwen3_5ForCausalLM": "gated delta net",
    "Qwen3_5MoeForCausalLM": "gated delta net",
    "Qwen3_5ForConditionalGeneration": "gated delta net",
    "Qwen3_5MoeForConditionalGeneration": "gated delta net",
    "Qwen3_5MTP": "gated delta net",
    "Qwen3_5MoeMTP": "gated delta net",
    "MiniCPMV4_6ForConditionalGeneration": "gated delta net",
    "OlmoHybridForCausalLM": "gated delta net",
    "KimiLinearForCausalLM": "Kimi delta attention",
    "Glm5NextForCausalLM": "Kimi delta attention",
    "Glm5NextForConditionalGeneration": "Kimi delta attention",
    "MambaForCausalLM": "state-space",
    "FalconMambaForCausalLM": "state-space",
    "Mamba2ForCausalLM": "state-space",
    "JambaForCausalLM": "state-space",
    "JambaForSequenceClassification": "state-space",
    "GraniteMoeHybridForCausalLM": "state-space",
    "FalconH1ForCausalLM": "state-space",
    "NemotronHForCausalLM": "state-space",
    "Lfm2ForCausalLM": "short convolution",
    "Lfm2MoeForCausalLM": "short convolution",
}
"""Type of the layers with states, by architecture."""


def has_states(config: VllmConfig) -> bool:
    """Whether the model has layers with states instead of pages."""
    return bool(config.model_config.is_hybrid or config.model_config.is_attention_free)
