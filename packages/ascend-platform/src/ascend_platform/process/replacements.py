# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Weights and adapters that are replaced in a running engine, for connectors that share KV cache:
what was computed before and after must not be exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

READS = frozenset(
    (
        "annotate_profile",
        "check_health",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "get_cache_block_size_bytes",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "handle_ft_command",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown",
        "shutdown_weight_transfer_engine",
        "sleep",
        "supports_draft_weight_updates",
        "synchronize_device",
        "update_max_model_len",
        "wait_for_comm",
    )
)
"""Methods of vLLM's worker (``vllm/v1/worker/gpu_worker.py``) that leave weights and adapters as
they are. Any other that is called by ``collective_rpc``, a worker extension's or a function for
``apply_model``, may have replaced weights."""


class Listener(Protocol):
    """A connector's scheduler side; its methods are called between two steps."""

    def weights_replaced(self) -> None:
        """Weights may be others from now on."""

    def loading_adapter(self, lora_request: Any) -> Callable[[], None]:
        """An adapter is about to be loaded; the result is called when that has ended."""


_engines: dict[int, tuple[Any, weakref.WeakSet[Any]]] = {}
"""CacheConfig and listeners of each engine in this process, by the CacheConfig's id: copies of a
VllmConfig share it, and vLLM does not replace it. ``instance_id`` changes when an engine core has
started (``vllm/v1/engine/core.py``, ``_perform_handshakes``)."""


def listen(vllm_config: Any, listener: Listener) -> None:
    """Notify a listener, for its life, of what is replaced in the engine of this configuration.

    In the process of the engine core: vLLM's API calls its workers through it
    (``EngineCore.collective_rpc``, ``add_lora``). A worker in the same process also notes what a
    program loads into its model directly.

    Raises:
        RefusedError: vLLM's engine core is not one that is supported.
    """
    from ascend_platform.overrides import guard

    guard.install("common", "process.engine_core")
    cache_config = vllm_config.cache_config
    _engines.setdefault(id(cache_config), (cache_config, weakref.WeakSet()))[1].add(listener)


def listeners(vllm_config: Any) -> list[Any]:
    """Listeners of the engine of this configuration or a copy."""
    _, found = _engines.get(id(vllm_config.cache_config), (None, ()))
    return list(found)


def note_weights(vllm_config: Any) -> None:
    """Weights of the engine of this configuration are being replaced, or may have been."""
    for listener in listeners(vllm_config):
        listener.weights_replaced()


def note_adapter(vllm_config: Any, lora_request: Any) -> ExitStack:
    """Context in which an adapter is loaded."""
    context = ExitStack()
    for listener in listeners(vllm_config):
        context.callback(listener.loading_adapter(lora_request))
    return context
