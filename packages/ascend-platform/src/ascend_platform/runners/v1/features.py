# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features that the V1 model runner does not support on NPUs."""

import importlib.util
from typing import Any

from ascend_platform.config.features import V1, Feature
from ascend_platform.config.model_runner import choice
from ascend_platform.errors import RefusedError
from ascend_platform.runners.features import drafts, has_stages

V2_ONLY = "or serve with V2, the default from vLLM 0.33 on"

FEATURES = (
    Feature(
        "watermarking",
        lambda config: getattr(config, "watermark_config", None),
        runners=V1,
        fix=f"leave it out, {V2_ONLY}",
    ),
    # vLLM leaves this check to platforms that are not its own (``vllm/config/vllm.py``,
    # _verify_aux_output_compatibility).
    Feature(
        "--enable-return-routed-experts",
        lambda config: config.aux_output_config.enabled,
        runners=V1,
        fix=f"leave the option out, {V2_ONLY}",
    ),
    Feature(
        "encoder-cache connectors",
        lambda config: config.ec_transfer_config is not None,
        runners=V1,
        fix=f"leave them out, {V2_ONLY}",
    ),
    Feature(
        "speculative decoding by n-grams with pipeline parallelism",
        lambda config: (
            has_stages(config) and drafts(config, lambda it: it.method in ("ngram", "ngram_gpu"))
        ),
        runners=V1,
        fix="--pipeline-parallel-size 1 with a larger --tensor-parallel-size, leave"
        f" --speculative-config out, {V2_ONLY}",
    ),
)


def check(vllm_config: Any) -> None:
    """Refuse n-grams without numba.

    Raises:
        RefusedError: the command that installs it.
    """
    if vllm_config.model_config is None or not drafts(vllm_config, lambda it: it.method == "ngram"):
        return
    if not choice(vllm_config).is_v2 and not importlib.util.find_spec("numba"):
        raise RefusedError(
            "speculative decoding with ngram needs numba; fix: pip install 'ascend-platform[ngram]'"
        )
