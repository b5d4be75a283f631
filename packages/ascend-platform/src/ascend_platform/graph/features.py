# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features of graphs and of torch.compile that are not supported."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ascend_platform.attention import selector
from ascend_platform.config.features import Feature
from ascend_platform.errors import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _fuses(config: VllmConfig) -> bool:
    passes = config.compilation_config.pass_config
    names = {
        field.name
        for field in dataclasses.fields(passes)
        if field.name.startswith(("fuse_", "enable_"))
    }
    return any(getattr(passes, name) is True for name in names - {"fuse_norm_quant"})


FEATURES = (Feature("fusions by torch.compile other than fuse_norm_quant", _fuses),)


def check(vllm_config: VllmConfig) -> None:
    """Refuse graphs of whole steps with attention that cannot be captured.

    Raises:
        RefusedError: the model's attention, and the modes that are supported, in one line.
    """
    from vllm.config import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode
    if vllm_config.model_config is None or mode != CUDAGraphMode.FULL:
        return
    if (attention := selector.describe_backend(vllm_config)).startswith("built-in"):
        raise RefusedError(
            "cudagraph_mode FULL needs attention that can be captured, and this model's is"
            f" {attention}; supported: PIECEWISE, NONE; fix: set one of these"
        )
