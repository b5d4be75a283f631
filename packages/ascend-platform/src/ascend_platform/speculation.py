"""Speculative decoding: which of vLLM's methods are served, and what it changes in the configuration."""

from typing import Any

from ascend_platform import extension

_REFUSED = {
    "dflash": "its drafter attends to tokens on both sides, and the attentions here are causal",
    "gemma4_mtp": "its drafter captures CUDA graphs of its own",
    "extract_hidden_states": "it needs a KV connector, and these come later",
    "ngram_gpu": "vLLM compiles it with Inductor for CUDA; method ngram drafts the same tokens",
}


def check(vllm_config: Any) -> None:
    """Refuse the methods that cannot be served, and leave asynchronous scheduling where speculation would need it out.

    The attention kernels take each request's length from the host. With asynchronous scheduling the host does not know yet how
    many draft tokens were accepted when it lays out the next step.

    Raises:
        RefusedError: the method by its name, and why.
    """
    config = vllm_config.speculative_config
    if config is None:
        return
    name = next((name for name, asked in _asked(config).items() if asked), config.method)
    if reason := _REFUSED.get(name):
        raise extension.RefusedError(f"speculative decoding by {name} is not served: {reason}")
    if name == "suffix" and not extension.version("arctic-inference"):
        raise extension.RefusedError("speculative decoding by suffix needs arctic-inference; run: pip install arctic-inference")
    if vllm_config.scheduler_config.async_scheduling:
        extension.logger.info("asynchronous scheduling is off: with speculative decoding the attention needs lengths that it defers")
        vllm_config.scheduler_config.async_scheduling = False


def _asked(config: Any) -> dict[str, bool]:
    return {"gemma4_mtp": config.use_gemma4_mtp(), "dflash": config.use_dflash(), "ngram_gpu": config.use_ngram_gpu()}
