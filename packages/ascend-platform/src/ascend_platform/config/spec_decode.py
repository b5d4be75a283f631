"""Speculative decoding: which of vLLM's methods are served, and what it changes in the configuration."""

import importlib.util
from typing import Any

from ascend_platform import extension

REFUSED = {
    "dflash": "its drafter attends to tokens on both sides, and the attentions here are causal",
    "gemma4_mtp": "its drafter captures CUDA graphs of its own",
    "ngram_gpu": "vLLM compiles it with Inductor; ngram drafts the same tokens",
}
"""Methods of vLLM's V1 runner that are not served, and why."""


def check(vllm_config: Any) -> None:
    """Refuse the methods that cannot be served, and let no step be laid out before the lengths that it needs are known.

    The attention kernels take each request's length from the host. With asynchronous scheduling the host lays out a step before
    it knows how many draft tokens of the last one were accepted.

    Raises:
        RefusedError: the method by its name, and why.
    """
    config = vllm_config.speculative_config
    if config is None:
        return
    asked = {"dflash": config.use_dflash(), "gemma4_mtp": config.use_gemma4_mtp(), "ngram_gpu": config.use_ngram_gpu()}
    if name := next((name for name in asked if asked[name]), ""):
        raise extension.RefusedError(f"speculative decoding by {name} is not served: {REFUSED[name]}")
    if config.method == "ngram" and not importlib.util.find_spec("numba"):
        raise extension.RefusedError("speculative decoding by ngram needs numba; run: pip install 'ascend-platform[ngram]'")
    if vllm_config.scheduler_config.async_scheduling:
        extension.logger.info("asynchronous scheduling is off: speculative decoding needs to know each step's lengths")
        vllm_config.scheduler_config.async_scheduling = False
