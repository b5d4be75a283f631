"""Speculative decoding: methods that are refused."""

import importlib.util
from typing import Any

from ascend_platform import extension

REFUSED = {
    "dflash": "its drafter needs non-causal attention, and the attention backends for NPUs are causal",
    "gemma4_mtp": "its drafter captures CUDA graphs of its own",
    "openPangu's MTP": "vLLM's drafter asks its decoder layer for use_sequence_parallel_moe, which only DeepSeek's has",
}
"""Methods of vLLM's V1 runner that are not supported, and why."""


def check(vllm_config: Any) -> None:
    """Refuse methods that are not supported.

    Raises:
        RefusedError: the method by its name, and why.
    """
    config = vllm_config.speculative_config
    if config is None:
        return
    drafter = getattr(config.draft_model_config, "architectures", ())  # no model with n-grams
    asked = {
        "dflash": config.use_dflash(),
        "gemma4_mtp": config.use_gemma4_mtp(),
        "openPangu's MTP": "OpenPanguMTPModel" in drafter,
    }
    if name := next((name for name in asked if asked[name]), ""):
        raise extension.RefusedError(f"speculative decoding with {name} is not supported: {REFUSED[name]}")
    if config.method == "ngram" and not importlib.util.find_spec("numba"):
        raise extension.RefusedError("speculative decoding with ngram needs numba; fix: pip install 'ascend-platform[ngram]'")
