# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features that the V1 model runner does not support on NPUs; checked if V1 is chosen."""

import importlib.util
from typing import Any

from ascend_platform.errors import RefusedError

DRAFTS = {
    "dflash": (
        "its drafter needs non-causal attention, and the attention backends for NPUs are causal"
    ),
    "gemma4_mtp": "its drafter captures CUDA graphs of its own",
}
"""Methods of speculative decoding that are not supported, and why."""

VERIFICATIONS = {
    "block": "vLLM has it in its V2 model runner only",
    "fly": "its kernels in vLLM's V1 model runner need Triton",
}
"""Values of ``rejection_sample_method`` that are not supported, and why; V2 lacks them too."""


def check(vllm_config: Any) -> None:
    """Refuse methods of speculative decoding and of the verification of draft tokens.

    Raises:
        RefusedError: the method by its name, and why.
    """
    config = vllm_config.speculative_config
    if config is None:
        return
    asked = {"dflash": config.use_dflash(), "gemma4_mtp": config.use_gemma4_mtp()}
    if name := next((name for name in asked if asked[name]), ""):
        raise RefusedError(
            f"speculative decoding with {name} is not supported: {DRAFTS[name]}; fix: choose"
            " another method"
        )
    if (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        # vLLM makes the drafter in the last stage and reads it in all (V1, gpu_model_runner.py);
        # its drafters with layers number them from those of one stage.
        raise RefusedError(
            f"speculative decoding with {config.method} in {stages} pipeline stages is not"
            " supported by the V1 model runner; fix: --pipeline-parallel-size 1 with a larger"
            " --tensor-parallel-size, leave --speculative-config out, or n-grams with the V2"
            " model runner"
        )
    if (verification := getattr(config, "rejection_sample_method", "")) in VERIFICATIONS:
        raise RefusedError(
            f"rejection_sample_method {verification} of speculative decoding is not supported:"
            f" {VERIFICATIONS[verification]}; fix: leave it out"
        )
    if config.method == "ngram" and not importlib.util.find_spec("numba"):
        raise RefusedError(
            "speculative decoding with ngram needs numba; fix: pip install 'ascend-platform[ngram]'"
        )
