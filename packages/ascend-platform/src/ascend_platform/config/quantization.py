# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantized weights: the methods by name, and the calls of the component that loads them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ascend_platform.chips import FAMILIES
from ascend_platform.errors import RefusedError
from ascend_platform.logger import logger
from ascend_platform.plugins import registry, requirements, slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODELSLIM = "ascend"
"""Value of ``--quantization`` for ModelSlim checkpoints."""

DESCRIPTION = "quant_model_description.json"
METHODS = (
    MODELSLIM,
    "compressed-tensors",
    "auto_awq",
    "auto_gptq",
    "fp8",
    "mxfp8",
    "modelopt_mxfp8",
    "gpt_oss_mxfp4",
    "deepseek_v4_fp8",
)
SCHEME_BITS = {
    name: int(name[1])
    for family in FAMILIES
    for name in family.quantization
    if "FP" not in name  # The name of a floating-point format.
}
"""Bits of a weight by integer scheme, such as 4 for ``W4A8_DYNAMIC``; the layout planner reads them
without importing torch."""


def formats() -> Any:
    """The module that a component offers for ``quantization``, or None."""
    path = slots.offered("quantization")
    return path and importlib.import_module(path)


def register() -> None:
    """Register the offered formats with vLLM, before a model is configured."""
    if offered := formats():
        offered.register()


def check(method: str) -> None:
    """Refuse a quantization method that is not supported.

    Raises:
        RefusedError: the supported methods, the component that is missing, or why none is supported
            with this vLLM.
    """
    own = f"ascend-platform {requirements.version('ascend-platform')}"
    if method not in METHODS:
        raise RefusedError(
            f"{own} supports quantization methods {', '.join(METHODS)}; the model has {method!r};"
            " fix: serve a checkpoint of one of these"
        )
    if (offered := formats()) is None:
        raise RefusedError(
            f"the model is quantized ({method}), which needs"
            f" {registry.with_state('ascend-quantization')}"
        )
    if error := offered.register():
        raise RefusedError(
            f"the model is quantized ({method}), and {own} cannot load quantized weights with vLLM"
            f" {requirements.version('vllm')}: {error}; fix: {requirements.upgrade_command()}"
        ) from error
    offered.check_method(method)


def detect(vllm_config: VllmConfig) -> None:
    """Set the method for a ModelSlim checkpoint, also of a drafter, where neither the user nor the
    checkpoint's configuration names one.

    vLLM asks quantization configurations only about models whose ``config.json`` has a
    ``quantization_config`` (``vllm/config/model.py``), and ModelSlim writes none.

    Raises:
        RefusedError: the method is not supported, see :func:`check`.
    """
    from vllm.transformers_utils.repo_utils import file_or_path_exists

    target, drafts = vllm_config.model_config, vllm_config.speculative_config
    models: Any = (target, drafts and drafts.draft_model_config)
    for model in models:
        if model is None or model.quantization is not None:
            continue
        if not file_or_path_exists(model.model, DESCRIPTION, model.revision):
            continue
        check(MODELSLIM)
        logger.info("%s has a file %s: --quantization %s", model.model, DESCRIPTION, MODELSLIM)
        model.quantization = MODELSLIM
        if model is target and vllm_config.quant_config is None:
            load = vllm_config.load_config
            vllm_config.quant_config = vllm_config.get_quantization_config(model, load)
