# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Defaults and choices that the platform adds to a configuration; nothing else is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_platform import options
from ascend_platform.config import compilation, devices, kv_connectors, model_runner
from ascend_platform.logger import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def set_defaults(vllm_config: VllmConfig) -> None:
    """Set what vLLM's own defaults depend on, before vLLM sets them.

    Raises:
        RefusedError: an unsupported option, or a KV connector that no component offers.
    """
    options.take(vllm_config)
    kv_connectors.resolve(vllm_config)
    vllm_config.kernel_config.enable_jit_warmup = False
    compilation.set_defaults(vllm_config)


def update(vllm_config: VllmConfig) -> None:
    """Set what the user has left open, after vLLM's own defaults."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = "ascend_platform.worker.worker.NPUWorker"
    model_runner.resolve(vllm_config)
    compilation.cover_largest_decode(vllm_config)
    compilation.split_at_indexers(vllm_config)
    if vllm_config.model_config and vllm_config.model_config.is_mm_prefix_lm:
        # A step has all tokens of an image, which attend to each other in both directions.
        scheduler.disable_chunked_mm_input = True
    if scheduler.disable_chunked_mm_input and scheduler.long_prefill_token_threshold:
        logger.warning("long_prefill_token_threshold is ignored: a step has all tokens of an image")
        scheduler.long_prefill_token_threshold = 0
    if parallel.numa_bind_nodes is None:
        devices.bind_to_numa_nodes(parallel, options.of(options.Platform, vllm_config).numa_bind)
