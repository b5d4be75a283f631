# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Functions of vLLM's linear attention and state-space layers that launch Triton kernels, replaced
for models with such layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ascend_platform.overrides import guard
from ascend_platform.state_layers import state_cache

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def collect_mamba_copy_meta(
    copy_bufs: Any,
    kv_cache_config: KVCacheConfig,
    mamba_state_copy_funcs: Any,
    mamba_group_ids: Iterable[int],
    src_block_idx: int,
    dest_block_idx: int,
    accept_token_bias: int,
    req_state: Any,
    forward_context: Mapping[str, Any],
) -> None:
    """Copy a request's states to the block in which it goes on; vLLM's collects their addresses for
    a Triton kernel."""
    assert accept_token_bias == 0  # With draft tokens prefix caching is refused.
    for group in mamba_group_ids:
        blocks = req_state.block_ids[group]
        names = kv_cache_config.kv_cache_groups[group].layer_names
        state_cache.copy(forward_context, names, blocks[src_block_idx], blocks[dest_block_idx])


def set_triton_allocator(device: object) -> None:
    """No-op: there is no Triton."""


def install(vllm_config: VllmConfig) -> None:
    """Replace the functions in this process, and select the gated delta rule for the model.

    Raises:
        RefusedError: one is missing, or its source has changed.
    """
    from ascend_platform.state_layers.gated_delta import select
    from ascend_platform.state_layers.kernels.gated_delta import chunk_rule, recurrent_rule, rules

    _replace()
    rules.decode, rules.prefill = recurrent_rule, chunk_rule
    if selected := select(vllm_config):
        fused = selected.fused
        if selected.serves("decode"):
            rules.decode = fused.decode
        if selected.serves("prefill"):
            rules.prefill = fused.prefill


@functools.cache
def _replace() -> None:
    from ascend_platform.state_layers.kernels import gated_delta

    guard.install("states")

    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        ChunkGatedDeltaRule,
        QwenGatedDeltaNetAttention,
    )
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    from ascend_platform.state_layers.gated_delta_net import NPUGatedDeltaNetAttention

    if ChunkGatedDeltaRule.__name__ in op_registry_oot:
        return

    # That module has the function under a name of its own.
    class NPUChunkGatedDeltaRule(ChunkGatedDeltaRule):
        """vLLM's operator of a prefill, which calls the function of its library for devices without
        one of their own."""

        def forward_native(self, *arguments: Any, **named: Any) -> Any:
            return gated_delta.chunk_gated_delta_rule(*arguments, **named)

    class NPUMambaMixer2(MambaMixer2):
        """vLLM's layer without states within a prefill for prefix caching, and without warm-up of
        Triton kernels."""

        get_kv_cache_spec = MambaBase.get_kv_cache_spec

        def _warmup_ssd_kernels(self, projected_states: Any) -> None:
            """Nothing to warm up."""

    ChunkGatedDeltaRule.register_oot(NPUChunkGatedDeltaRule)
    QwenGatedDeltaNetAttention.register_oot(NPUGatedDeltaNetAttention)
    MambaMixer2.register_oot(NPUMambaMixer2)
