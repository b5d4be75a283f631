"""Speculative decoding: methods that are refused, and asynchronous scheduling."""

import importlib.util
from typing import Any

from ascend_platform import extension

REFUSED = {
    "dflash": "its drafter needs non-causal attention, and the attention backends for NPUs are causal",
    "gemma4_mtp": "its drafter captures CUDA graphs of its own",
    "ngram_gpu": "vLLM compiles it with Inductor; ngram proposes the same draft tokens",
}
"""Methods of vLLM's V1 runner that are not supported, and why."""


def check(vllm_config: Any) -> None:
    """Refuse methods that are not supported, and disable asynchronous scheduling.

    The attention kernels take each request's sequence length from the host. With asynchronous scheduling the host prepares a
    step before it knows how many draft tokens of the previous step were accepted.

    Raises:
        RefusedError: the method by its name, and why.
    """
    config = vllm_config.speculative_config
    if config is None:
        return
    asked = {"dflash": config.use_dflash(), "gemma4_mtp": config.use_gemma4_mtp(), "ngram_gpu": config.use_ngram_gpu()}
    if name := next((name for name in asked if asked[name]), ""):
        raise extension.RefusedError(f"speculative decoding with {name} is not supported: {REFUSED[name]}")
    if config.method == "ngram" and not importlib.util.find_spec("numba"):
        raise extension.RefusedError("speculative decoding with ngram needs numba; fix: pip install 'ascend-platform[ngram]'")
    if vllm_config.scheduler_config.async_scheduling:
        extension.logger.info("asynchronous scheduling disabled: speculative decoding needs exact sequence lengths in each step")
        vllm_config.scheduler_config.async_scheduling = False
