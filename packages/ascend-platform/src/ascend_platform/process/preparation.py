# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Preparation of a process for an engine whose configuration is accepted: environment, sockets,
Ray and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_platform import activation
from ascend_platform.config import allocator, collectives, model_runner
from ascend_platform.logger import logger
from ascend_platform.observability import metrics
from ascend_platform.plugins import installed
from ascend_platform.plugins.plugin_filter import VARIABLE, PluginFilter
from ascend_platform.process import ray, scopes, sockets
from ascend_platform.transfer import checkpoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def prepare(vllm_config: VllmConfig) -> None:
    """Prepare this process, and the environment of those that it will start."""
    parallel = vllm_config.parallel_config
    model_runner.publish(vllm_config)
    collectives.prepare(parallel)
    if parallel.distributed_executor_backend != "external_launcher":
        sockets.use_own_directory()
    if "ray" in (parallel.distributed_executor_backend, parallel.data_parallel_backend):
        ray.prepare(parallel)
    if "platform" in scopes.scopes_here():  # Once: engines prepare their processes too.
        _warn(vllm_config)
    if vllm_config.kv_transfer_config is not None and vllm_config.model_config is not None:
        # For the scheduler, whose process may load no weights.
        checkpoint.note_files(vllm_config.model_config)
    metrics.offer(vllm_config)
    activation.activate(vllm_config)


def _warn(vllm_config: VllmConfig) -> None:
    """Warn of settings in the environment: of the allocator with KV transfer, and of names in
    VLLM_PLUGINS that no plugin has, which vLLM ignores."""
    if vllm_config.kv_transfer_config is not None:
        allocator.warn_of_transfer()
    if wrong := PluginFilter.current().problem(installed.names()):
        logger.warning("%s: %s", VARIABLE, wrong[0])
