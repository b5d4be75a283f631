"""Models with linear attention or state-space layers: which are served, and what is not supported with them."""

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
    "OlmoHybridForCausalLM": "gated delta net",
    "MambaForCausalLM": "state-space",
    "FalconMambaForCausalLM": "state-space",
    "Mamba2ForCausalLM": "state-space",
    "JambaForCausalLM": "state-space",
    "BambaForCausalLM": "state-space",
    "GraniteMoeHybridForCausalLM": "state-space",
    "FalconH1ForCausalLM": "state-space",
    "NemotronHForCausalLM": "state-space",
    "Zamba2ForCausalLM": "state-space",
    "Lfm2ForCausalLM": "short convolution",
    "Lfm2MoeForCausalLM": "short convolution",
}
"""The kind of layers with states, by architecture."""


def refused(config: VllmConfig) -> str:
    """What is asked for that is not supported, in words; "" if all is."""
    model = config.model_config
    if not (model.is_hybrid or model.is_attention_free):
        return ""
    if model.architecture not in SERVED:
        return f"state-space layers ({model.architecture})"
    asked = {
        "KV connectors": config.kv_transfer_config,
        "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "prefix caching and draft tokens (fix: --no-enable-prefix-caching)": config.cache_config.mamba_cache_mode != "none"
        and config.speculative_config,
    }
    found = ", ".join(name for name, is_asked in asked.items() if is_asked)
    return f"{found} with {SERVED[model.architecture]} layers" if found else ""
