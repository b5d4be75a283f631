# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Refusal of quantization methods for weights that are not quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_platform import quantization
from ascend_platform.config.features import Feature

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FEATURES: tuple[Feature, ...] = ()


def check(vllm_config: VllmConfig) -> None:
    """Refuse a method for weights that are not quantized.

    Raises:
        RefusedError: the method and the model.
    """
    quantization.check_weights(vllm_config.model_config)
