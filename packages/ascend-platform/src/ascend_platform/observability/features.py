# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features of profiling that are not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_platform.config.features import Feature

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _other_profiler(config: VllmConfig) -> str:
    profiler = config.profiler_config.profiler
    return "" if profiler in (None, "torch") else profiler


FEATURES = (
    Feature(
        "--enable-layerwise-nvtx-tracing, for NVIDIA's profiler (--profiler-config '{\"profiler\":"
        ' "torch"}\' traces operators)',
        lambda config: config.observability_config.enable_layerwise_nvtx_tracing,
    ),
    Feature("profilers other than torch", _other_profiler),
)
