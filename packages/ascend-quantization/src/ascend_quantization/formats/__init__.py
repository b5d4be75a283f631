# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Checkpoint formats of quantized models."""

from __future__ import annotations

import functools
from typing import Any

from ascend_platform import extension

from ascend_quantization.common import (
    DEEPSEEK_V4,
    FP8,
    MXFP4,
    SCHEMES_OF,
    check_chip,
    not_quantized,
)


@functools.cache
def register() -> ImportError | None:
    """Register the formats with vLLM, once. Imports vLLM's quantization, so call it only before a
    model is configured.

    Never raises: with a vLLM that lacks a name imported here, models that are not quantized still
    work; the error is returned, and the platform raises it for the others.
    """
    try:
        import ascend_quantization.formats.awq_gptq
        import ascend_quantization.formats.compressed_tensors
        import ascend_quantization.formats.deepseek_v4
        import ascend_quantization.formats.fp8
        import ascend_quantization.formats.modelslim
        import ascend_quantization.formats.mxfp4
        import ascend_quantization.formats.mxfp8  # noqa: F401

        extension.install_overrides("ascend_quantization", "formats.mxfp8")
    except ImportError as error:
        return error
    return None


def check_method(method: str) -> None:
    """Refuse a method whose schemes the chip does not have.

    Raises:
        RefusedError: the schemes and the chip.
    """
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
