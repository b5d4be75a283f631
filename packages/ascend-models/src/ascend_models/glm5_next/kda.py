# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Kernels of GLM-5-next's Kimi delta attention: replacements of vLLM's functions, whose arguments
are named as there."""

from typing import Any

import torch

from ascend_models.common import kda


def chunk_kda_with_fused_gate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lower_bound: float | None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill; tensors of tokens have a first dimension of 1, and ``beta`` is between 0 and 1."""
    g = kda.gates(raw_g[0], A_log, g_bias, lower_bound)
    queries, keys = kda.normalize(q[0]) * q.shape[-1] ** -0.5, kda.normalize(k[0])
    output, states = kda.chunk_rule(queries, keys, v[0], g, beta[0], initial_state, cu_seqlens)
    return output[None], states


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    a_log: torch.Tensor,
    g_bias: torch.Tensor,
    lower_bound: float | None,
    out: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode of one token each; ``g`` and ``beta`` are projections, ``initial_state`` the layer's
    states, which are written, and ``out`` the output's place."""
    gates, strength = kda.gates(g[0], a_log, g_bias, lower_bound), beta[0].float().sigmoid()
    queries, keys = kda.normalize(q[0]) * q.shape[-1] ** -0.5, kda.normalize(k[0])
    indices = ssm_state_indices[: len(queries)]
    output = kda.recurrent_rule(queries, keys, v[0], gates, strength, initial_state, indices)
    return (output[None] if out is None else out.copy_(output[None])), initial_state
