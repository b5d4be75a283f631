# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The gated delta rule of linear attention layers (Qwen3-Next, Qwen3.5, OLMo-hybrid) in PyTorch.

A head has a state ``S`` of ``[values, keys]``; a token with query q, key k, value v, decay g and
strength b changes it to ``S' = exp(g) S + b (v - exp(g) S k) kᵀ`` and reads ``S' q``. Prefills
compute 64 tokens at once (the WY form of these updates), decodes one after the other. Nothing here
waits for the device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_npu

from ascend_platform import host
from ascend_platform.attention.base import GatedDeltaInputs
from ascend_platform.state_layers.kernels import packed


def chunk_rule(
    inputs: GatedDeltaInputs, states: torch.Tensor, query_start_loc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute sequences, or chunks of them.

    Args:
        states: ``[requests, heads, values, keys]`` before these tokens.

    Returns:
        ``[tokens, heads, values]`` of v's dtype, and the new states in float32.
    """
    v, scale = inputs.v, inputs.scale
    output, states = v.new_zeros(len(v) + 1, *v.shape[1:]), states.float().clone()
    for slab in packed.slabs(query_start_loc, len(v)):
        keys, queries = (slab.heads(each, v.shape[1]) for each in (inputs.k, inputs.q))
        values, strength = slab.heads(v), slab.heads(inputs.beta[..., None])
        decay, between = slab.decays(inputs.g)
        weighted = keys * strength
        inverse = packed.unit_lower_inverse(weighted @ keys.mT * between)
        seen = inverse @ (weighted * decay.exp()[..., None])
        values = inverse @ (values * strength)
        scores = queries @ keys.mT * between * scale
        queries = queries * (decay.exp() * scale)[..., None]
        last = decay[..., -1:]
        keys, kept = keys * (last - decay).exp()[..., None], last.exp()[..., None]
        slab.write(output, slab.scan(states, queries, keys, values, seen, scores, kept))
    return output[:-1], states


def recurrent_rule(
    inputs: GatedDeltaInputs,
    states: torch.Tensor,
    indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    may_pad: bool = True,
) -> torch.Tensor:
    """Compute the token of each request, or its token and draft tokens.

    Args:
        states: ``[blocks, heads, values, keys]``, written; block 0 belongs to no request.
        indices: ``[requests]``, or ``[requests, steps]`` with a block for the state after each
            token.
        query_start_loc: ``[requests + 1]``; None for a token each.
        num_accepted_tokens: ``[requests]``, which of the blocks has the state to begin with, from
            1; or None.
        may_pad: whether padding tokens may have other decays and strengths than 0.

    Returns:
        ``[tokens, heads, values]`` of v's dtype; rows of no request are undefined.
    """
    v, g, beta = inputs.v, inputs.g, inputs.beta
    groups, output = v.shape[1] // inputs.k.shape[1], torch.zeros_like(v)
    q, k = (
        packed.repeat_heads(each.float(), groups) for each in (inputs.q * inputs.scale, inputs.k)
    )

    def step(
        state: torch.Tensor, tokens: slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = state * g[tokens].float().exp()[..., None, None]
        key = k[tokens]
        change = (v[tokens].float() - (state @ key[..., None]).squeeze(-1)) * beta[tokens].float()[
            ..., None
        ]
        state = state + change[..., None] * key[..., None, :]
        return state, (state @ q[tokens][..., None]).squeeze(-1)

    packed.decode(states, indices, indices, query_start_loc, num_accepted_tokens, output, step)
    return output


def gates(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays, as logarithms in float32, and strengths ``[tokens, heads]`` of a layer's projections a
    and b."""
    return -a_log.float().exp() * F.softplus(a + dt_bias.float()), b.sigmoid()


def normalize(x: torch.Tensor) -> torch.Tensor:
    """x with vectors of length 1, in its dtype: their RMS norm over the root of their size."""
    if host.chip_family().lacks("npu_rms_norm"):
        values = x.float()
        return (values * torch.rsqrt(values.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
    size = x.shape[-1]
    return torch_npu.npu_rms_norm(x, _weight(size, x.device), 1e-6 / size)[0]


@functools.cache
def _weight(size: int, device: torch.device) -> torch.Tensor:
    return torch.full((size,), size**-0.5, device=device)


@dataclass
class Rules:
    """Implementations of this process, which ``state_layers/replacements.py`` selects for its model."""

    prefill: Callable[..., tuple[torch.Tensor, torch.Tensor]] = chunk_rule
    decode: Callable[..., torch.Tensor] = recurrent_rule


rules = Rules()

# Replacements of vLLM's functions; arguments are named as there.


def fused_post_conv_prep(
    conv_output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool = True,
    output_g_exp: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, decays and strengths of a prefill's convolved tokens."""
    q, k, v = _heads(conv_output, num_k_heads, head_k_dim, head_v_dim)
    g, beta = gates(A_log, a, b, dt_bias)
    if apply_l2norm:
        q, k = normalize(q), normalize(k)
    return q, k, v, g.exp() if output_g_exp else g, beta


def _heads(mixed: torch.Tensor, key_heads: int, keys: int, values: int) -> list[torch.Tensor]:
    parts = mixed.split(
        [key_heads * keys, key_heads * keys, mixed.shape[1] - 2 * key_heads * keys], -1
    )
    return [
        part.unflatten(-1, (-1, size))
        for part, size in zip(parts, (keys, keys, values), strict=True)
    ]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill; tensors have a first dimension of 1."""
    assert initial_state is not None
    assert cu_seqlens is not None
    if use_qk_l2norm_in_kernel:
        q, k = normalize(q), normalize(k)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    inputs = GatedDeltaInputs(q[0], k[0], v[0], g[0], beta[0], scale)
    output, states = rules.prefill(inputs, initial_state, cu_seqlens)
    if core_attn_out is not None:
        core_attn_out.view(-1)[: output.numel()].copy_(output.view(-1))
    return output[None], states


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode; tensors of tokens have a first dimension of 1."""
    assert initial_state is not None
    assert ssm_state_indices is not None
    assert inplace_final_state
    assert cu_seqlens is not None
    if use_qk_l2norm_in_kernel:
        q, k = normalize(q), normalize(k)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    indices = ssm_state_indices[: len(cu_seqlens) - 1]
    inputs = GatedDeltaInputs(q[0], k[0], v[0], g[0], beta[0], scale)
    output = rules.decode(inputs, initial_state, indices, cu_seqlens, num_accepted_tokens)
    return output[None], initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode, with the layer's projections a and b instead of decays and strengths."""
    g, beta = gates(A_log, a, b, dt_bias)
    return fused_recurrent_gated_delta_rule(q, k, v, g[None], beta[None], **named)


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode of one token each, into ``out`` ``[tokens, 1, heads, values]``."""
    heads, values, keys = initial_state.shape[-3:]
    of_keys, of_values = mixed_qkv.split([mixed_qkv.shape[1] - heads * values, heads * values], -1)
    of_keys, v = of_keys.unflatten(-1, (-1, keys)), of_values.unflatten(-1, (-1, values))
    q, k = of_keys.chunk(2, 1)
    if use_qk_l2norm_in_kernel:
        q, k = normalize(q), normalize(k)
    g, beta = gates(A_log, a, b, dt_bias)
    inputs = GatedDeltaInputs(q, k, v, g, beta, scale)
    out.copy_(rules.decode(inputs, initial_state, ssm_state_indices, None, None)[:, None])
    return out, initial_state


def fused_olmo_hybrid_gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    allow_neg_eigval: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays and strengths ``[1, tokens, heads]``; OLMo's strengths may reach 2."""
    g, beta = gates(A_log, a, b, dt_bias)
    return g[None], (beta * 2 if allow_neg_eigval else beta)[None]
