# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantized weights and KV caches of ModelSlim, compressed-tensors, AWQ, GPTQ, FP8, MXFP8 and MXFP4
checkpoints, on CANN's operators.

Each scheme is a module of ``schemes``, registered in ``schemes/__init__.py``; ``formats`` has the
checkpoint formats.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ascend_platform.errors import RefusedError
from ascend_platform.logger import logger
from ascend_platform.plugins import requirements
from ascend_platform.quantization.common import (
    DEEPSEEK_V4,
    DESCRIPTION,
    FP8,
    METHODS,
    MXFP4,
    NAME,
    SCHEMES_OF,
    check_chip,
    not_quantized,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@functools.cache
def register() -> ImportError | None:
    """Register the formats with vLLM, once. Imports vLLM's quantization, so call it only before a
    model is configured.

    Never raises: with a vLLM that lacks a name imported here, models that are not quantized still
    work; the error is returned, and :func:`check` raises it for the others.
    """
    try:
        import ascend_platform.quantization.formats.awq_gptq
        import ascend_platform.quantization.formats.compressed_tensors
        import ascend_platform.quantization.formats.deepseek_v4
        import ascend_platform.quantization.formats.fp8
        import ascend_platform.quantization.formats.modelslim
        import ascend_platform.quantization.formats.mxfp4
        import ascend_platform.quantization.formats.mxfp8  # noqa: F401
    except ImportError as error:
        return error
    return None


def check(method: str) -> None:
    """Refuse a quantization method that is not supported.

    Raises:
        RefusedError: the supported methods, or why none is supported with this vLLM.
    """
    own = f"ascend-platform {requirements.version('ascend-platform')}"
    if method not in METHODS:
        raise RefusedError(
            f"{own} supports quantization methods {', '.join(METHODS)}; the model has {method!r};"
            " fix: serve a checkpoint of one of these"
        )
    if error := register():
        raise RefusedError(
            f"the model is quantized ({method}), and {own} cannot load quantized weights with vLLM"
            f" {requirements.version('vllm')}: {error}; fix: {requirements.upgrade_command()}"
        ) from error
    check_chip(SCHEMES_OF.get(method, ()))


def check_weights(model: Any) -> None:
    """Refuse a method for weights that are not quantized.

    Raises:
        RefusedError: the method and the model.
    """
    if model is None or model.quantization not in (FP8, MXFP4, DEEPSEEK_V4):
        return
    if not any(
        hasattr(each, "quantization_config") for each in (model.hf_config, model.hf_text_config)
    ):
        raise not_quantized(model.quantization, model.model)


def detect(vllm_config: VllmConfig) -> None:
    """Set the method for a ModelSlim checkpoint, also of a drafter, where neither the user nor the
    checkpoint's configuration names one.

    vLLM asks quantization configurations only about models whose ``config.json`` has a
    ``quantization_config`` (``vllm/config/model.py``), and ModelSlim writes none.

    Raises:
        RefusedError: none is supported with this vLLM.
    """
    from vllm.transformers_utils.repo_utils import file_or_path_exists

    target, drafts = vllm_config.model_config, vllm_config.speculative_config
    models: Any = (target, drafts and drafts.draft_model_config)
    for model in models:
        if model is None or model.quantization is not None:
            continue
        if not file_or_path_exists(model.model, DESCRIPTION, model.revision):
            continue
        check(NAME)
        logger.info("%s has a file %s: --quantization %s", model.model, DESCRIPTION, NAME)
        model.quantization = NAME
        if model is target and vllm_config.quant_config is None:
            load = vllm_config.load_config
            vllm_config.quant_config = vllm_config.get_quantization_config(model, load)
