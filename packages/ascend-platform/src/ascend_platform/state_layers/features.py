# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features of models with linear attention or state-space layers that are not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_platform.config.features import Feature
from ascend_platform.config.state_layers import SERVED, has_states

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def other_architecture(config: VllmConfig) -> str:
    """The architecture, if it has layers with states and is not served; "" if it is."""
    architecture = config.model_config.architecture
    return architecture if has_states(config) and architecture not in SERVED else ""


def other_options(config: VllmConfig) -> str:
    """Reason why the configuration is unsupported with recurrent layers, or ""."""
    if not has_states(config) or other_architecture(config):
        return ""
    asked = {
        "--kv-offloading-size": config.cache_config.kv_offloading_size is not None,
        "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "prefix caching and draft tokens; fix: --no-enable-prefix-caching": (
            config.cache_config.mamba_cache_mode != "none" and config.speculative_config
        ),
        "--use-replayssm": config.cache_config.use_replayssm,
    }
    return ", ".join(name for name, is_asked in asked.items() if is_asked)


FEATURES = (
    Feature(
        "other architectures with state-space or linear attention layers",
        other_architecture,
        of_model=True,
    ),
    Feature("options with state-space and linear attention layers", other_options, of_model=True),
)
