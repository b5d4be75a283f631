# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models with linear attention or state-space layers: which are served, and what is not supported
with them."""

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


def other_architecture(config: VllmConfig) -> str:
    """The architecture, if it has layers with states and is not served; "" if it is."""
    architecture = config.model_config.architecture
    return architecture if has_states(config) and architecture not in SERVED else ""


def other_options(config: VllmConfig) -> str:
    """Reason why the configuration is unsupported with recurrent layers, or ""."""
    if not has_states(config) or other_architecture(config):
        return ""
    asked = {
        "--kv-offloading-size": config.cache_config.kv_offloading_size is not None,
        "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "prefix caching and draft tokens; fix: --no-enable-prefix-caching": (
            config.cache_config.mamba_cache_mode != "none" and config.speculative_config
        ),
        "--use-replayssm": config.cache_config.use_replayssm,
    }
    return ", ".join(name for name, is_asked in asked.items() if is_asked)
