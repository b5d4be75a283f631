# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Kimi delta attention (KDA) in PyTorch: a gated delta rule whose decays differ by channel.

A head has a state ``S`` of ``[values, keys]``; a token with query q, key k, value v, decays g, one
for each channel of the keys, and strength b changes it to ``S' = S D + b (v - S D k) kᵀ`` with
``D = diag(exp(g))`` and reads ``S' q``. Prefills compute 64 tokens at once, decodes one after the
other. Nothing here waits for the device.

The formulas are those of section 3 of the Kimi Linear report (arXiv 2510.26692).
"""

from typing import Any

import torch
import torch.nn.functional as F
from ascend_platform import extension

BLOCK = 16
"""Tokens whose decays to each other are computed by their differences; two factors, multiplied,
would overflow where the decays are strong."""


def gates(
    raw: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """Logarithms of the decays, float32 ``[tokens, heads, keys]``, of a layer's projection of that
    shape; ``a_log`` is ``[heads]``, ``dt_bias`` ``[heads * keys]``."""
    logs = raw.float()
    if dt_bias is not None:
        logs = logs + dt_bias.float().view(logs.shape[1:])
    rates = a_log.float().exp().view(-1, 1)
    if lower_bound is None:
        return -rates * F.softplus(logs)
    return lower_bound * torch.sigmoid(rates * logs)


def normalize(x: torch.Tensor) -> torch.Tensor:
    """x in float32 with vectors of length 1."""
    values = x.float()
    return values * torch.rsqrt(values.square().sum(-1, keepdim=True) + 1e-6)


def chunk_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute sequences, or chunks of them.

    Args:
        q: ``[tokens, heads, keys]``, scaled.
        k: ``[tokens, heads, keys]``.
        v: ``[tokens, heads, values]``.
        g: float32 ``[tokens, heads, keys]``, see :func:`gates`.
        beta: ``[tokens, heads]``.
        states: ``[requests, heads, values, keys]`` before these tokens.
        query_start_loc: ``[requests + 1]``, the first token of each request.

    Returns:
        ``[tokens, heads, values]`` of v's dtype, and the new states in float32.
    """
    output, states = v.new_zeros(len(v) + 1, *v.shape[1:]), states.float().clone()
    for slab in extension.state_slabs(query_start_loc, len(v)):
        queries, keys, values, logs = (slab.heads(each) for each in (q, k, v, g))
        strength, sums = slab.heads(beta[..., None]), logs.cumsum(-2)
        inverse = extension.unit_lower_inverse(_scores(keys, keys, sums) * strength)
        scores, decay = _scores(queries, keys, sums), sums.exp()
        seen, values = inverse @ (keys * decay * strength), inverse @ (values * strength)
        queries, last = queries * decay, sums[..., -1:, :]
        keys, kept = keys * (last - sums).exp(), last.exp()
        slab.write(output, slab.scan(states, queries, keys, values, seen, scores, kept))
    return output[:-1], states


def _scores(rows: torch.Tensor, keys: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Each row times its own key and the earlier ones, decayed in between, as a lower triangular
    matrix; all are ``[chunks, heads, tokens, keys]``."""
    tokens, parts = rows.shape[-2], []
    for start in range(0, tokens, BLOCK):
        own, before = slice(start, start + BLOCK), slice(0, start)
        row, here = rows[..., own, :], sums[..., own, :]
        decays = (here[..., :, None, :] - here[..., None, :, :]).clamp_max(0).exp()
        part = (row[..., :, None, :] * keys[..., None, own, :] * decays).sum(-1).tril()
        if start:
            edge = sums[..., start - 1 : start, :]
            far = keys[..., before, :] * (edge - sums[..., before, :]).exp()
            part = torch.cat(((row * (here - edge).exp()) @ far.mT, part), -1)
        parts.append(F.pad(part, (0, tokens - part.shape[-1])))
    return torch.cat(parts, -2)


def recurrent_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Compute one token of each request; arguments are those of :func:`chunk_rule`, except:

    Args:
        states: ``[blocks, heads, values, keys]``, written; block 0 is of no request.
        indices: ``[requests]``, the block of each.

    Returns:
        ``[tokens, heads, values]`` of v's dtype; rows of no request are undefined.
    """
    output = torch.zeros_like(v)

    def step(
        state: torch.Tensor, tokens: slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state, key = state * g[tokens].exp()[..., None, :], k[tokens].float()
        change = v[tokens].float() - (state @ key[..., None]).squeeze(-1)
        change = change * beta[tokens].float()[..., None]
        state = state + change[..., None] * key[..., None, :]
        return state, (state @ q[tokens].float()[..., None]).squeeze(-1)

    extension.decode_states(states, indices, indices, None, None, output, step)
    return output


# Replacements of vLLM's functions; arguments are named as there.


def chunk_kda_with_fused_gate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor | None,
    lower_bound: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill; tensors of tokens have a first dimension of 1."""
    assert initial_state is not None
    assert cu_seqlens is not None
    g, beta = gates(raw_g[0], A_log, g_bias, lower_bound), raw_beta[0].float().sigmoid()
    queries, keys = normalize(q[0]) * q.shape[-1] ** -0.5, normalize(k[0])
    output, states = chunk_rule(queries, keys, v[0], g, beta, initial_state, cu_seqlens)
    return output[None], states.to(initial_state.dtype)


def fused_recurrent_kda_packed_decode(
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode of one token each; ``mixed_qkv`` has the convolved queries, keys and values."""
    heads, keys = initial_state.shape[1], initial_state.shape[3]
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in mixed_qkv.chunk(3, -1))
    g, beta = gates(raw_g[0], A_log, dt_bias, lower_bound), raw_beta[0].float().sigmoid()
    queries = normalize(q) * keys**-0.5
    output = recurrent_rule(queries, normalize(k), v, g, beta, initial_state, state_indices)
    return output[None], initial_state
