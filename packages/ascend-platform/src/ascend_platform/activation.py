# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Preparation of a process for an engine whose configuration is accepted, and activation: the steps
of each process once it has the configuration."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ascend_platform import options
from ascend_platform.attention import mla_prolog, selector
from ascend_platform.config import allocator, collectives, kv_connectors, model_runner
from ascend_platform.logger import logger
from ascend_platform.observability import metrics
from ascend_platform.plugins import installed, registry
from ascend_platform.plugins.plugin_filter import VARIABLE, PluginFilter
from ascend_platform.process import ray, scopes, sockets, startup
from ascend_platform.state_layers import gated_delta

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def prepare(vllm_config: VllmConfig) -> None:
    """Prepare this process, and the environment of those that it will start, and activate it."""
    parallel = vllm_config.parallel_config
    model_runner.publish(vllm_config)
    collectives.prepare(parallel)
    if parallel.distributed_executor_backend != "external_launcher":
        sockets.use_own_directory()
    if "ray" in (parallel.distributed_executor_backend, parallel.data_parallel_backend):
        ray.prepare(parallel)
    if "platform" in scopes.scopes_here():  # Once: engines prepare their processes too.
        _warn(vllm_config)
    # For the scheduler, whose process may load no weights.
    kv_connectors.note_checkpoint(vllm_config)
    metrics.offer(vllm_config)
    activate(vllm_config)


def _warn(vllm_config: VllmConfig) -> None:
    """Warn of settings in the environment: of the allocator with KV transfer, and of names in
    VLLM_PLUGINS that no plugin has, which vLLM ignores."""
    if vllm_config.kv_transfer_config is not None:
        allocator.warn_of_transfer()
    if wrong := PluginFilter.current().problem(installed.names()):
        logger.warning("%s: %s", VARIABLE, wrong[0])


def activate(vllm_config: VllmConfig) -> None:
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
