# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Activation: the steps of each process once it has an engine's configuration."""

import functools
from typing import TYPE_CHECKING

from ascend_platform.attention import gated_delta, selector
from ascend_platform.config import mla_prolog, model_runner, options
from ascend_platform.logger import logger
from ascend_platform.plugins import registry
from ascend_platform.process import startup

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def activate(vllm_config: "VllmConfig") -> None:
    """Configure the plugins and log the summary line, once per process, after its imports.

    Called where each process first has the configuration and all plugins are loaded:
    ``check_and_update_config`` in the API server, ``register_custom_kv_cache_specs`` in the engine
    core, ``NPUWorker`` in a worker.
    """
    startup.collect_garbage_as_before()
    registry.join("ascend-platform", "ascend", api=registry.API_VERSION)
    options.configure(vllm_config.additional_config)
    if vllm_config.model_config is not None:
        is_v2, why = model_runner.choice(vllm_config)
        _log_once(
            registry.summary(
                selector.describe_backend(vllm_config) + mla_prolog.describe(vllm_config),
                runner=f"V{1 + is_v2} ({why})",
                delta_rule=str(gated_delta.select(vllm_config) or ""),
            )
        )


@functools.cache
def _log_once(line: str) -> None:
    logger.info(line)
