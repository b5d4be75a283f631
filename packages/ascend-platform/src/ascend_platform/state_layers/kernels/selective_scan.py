# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""State-space layers (Mamba 1 and 2) in PyTorch: CANN has no operator for them.

A token changes the state ``h`` of a channel to ``exp(dt A) h + dt B x`` and reads
``C h + D x``. Nothing here waits for the device.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ascend_platform.state_layers.kernels import packed


def mamba_chunk_scan_combined_varlen(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    cu_seqlens: torch.Tensor,
    *_: Any,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    final_states_out: torch.Tensor | None = None,
    final_state_indices: torch.Tensor | None = None,
    **__: Any,
) -> torch.Tensor | None:
    """Mamba 2: compute sequences, or chunks of them, into ``out``.

    Args:
        x: ``[tokens, heads, size]``.
        dt: ``[tokens, heads]``.
        A: ``[heads]``.
        B: ``[tokens, groups, state]``.
        C: ``[tokens, groups, state]``.
        final_states_out: the cache ``[blocks, heads, size, state]`` whose blocks
            `final_state_indices`, ``[requests]``, get the states; since vLLM 0.33.

    Returns:
        The states ``[requests, heads, size, state]``; None if they are in the cache.
    """
    assert not return_intermediate_states  # which NPUMambaMixer2 does not ask for
    heads, steps = x.shape[1], _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    states = x.new_zeros(len(cu_seqlens) - 1, heads, x.shape[2], B.shape[2], dtype=torch.float32)
    if initial_states is not None:
        states.copy_(initial_states)
    logs = steps * A.float()
    written = out.new_empty(len(x) + 1, heads, x.shape[2])
    for slab in packed.slabs(cu_seqlens, len(x)):
        inputs, scale = slab.heads(x), slab.heads(steps[..., None])
        decay, between = slab.decays(logs)
        into, outof = slab.heads(B, heads), slab.heads(C, heads)
        inputs = inputs * scale
        within = (outof @ into.mT * between) @ inputs
        outof = outof * decay.exp()[..., None]
        last = decay[..., -1:]
        into, kept = into * (last - decay).exp()[..., None], last.exp()[..., None]
        outputs = []
        for each, request in enumerate(slab.requests.split(1)):
            state = states[request]
            outputs.append(within[each] + outof[each] @ state[0].mT)
            states[request] = state * kept[each] + inputs[each].mT @ into[each]
        slab.write(written, torch.stack(outputs))
    output = written[:-1].float()
    if D is not None:
        output = output + x.float() * (D if D.dim() == 2 else D[:, None]).float()
    if z is not None:
        output = output * F.silu(z.float())
    out.copy_(output)
    if final_states_out is None:
        return states.to(state_dtype or x.dtype)
    final_states_out[final_state_indices] = states.to(final_states_out.dtype)
    return None


def selective_scan_fn(
    u: torch.Tensor,
    ssm_states: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Mamba 1: compute sequences, or chunks of them, by scans of 64 tokens.

    Args:
        u: ``[channels, tokens]``.
        delta: ``[channels, tokens]``.
        z: ``[channels, tokens]``.
        ssm_states: ``[blocks, channels, state]``, written.
        A: ``[channels, state]``.
        B: ``[state, tokens]``.
        C: ``[state, tokens]``.

    Returns:
        ``[channels, tokens]``.
    """
    assert query_start_loc is not None
    assert cache_indices is not None
    assert has_initial_state is not None
    inputs, steps = u.t().float(), _steps(delta.t(), delta_bias, delta_softplus)
    into, outof = B.t().float(), C.t().float()
    request = packed.requests_of(len(inputs), query_start_loc)
    first = torch.arange(len(inputs), device=u.device) == query_start_loc[request]
    before = torch.where(has_initial_state.view(-1, 1, 1), ssm_states[cache_indices].float(), 0)
    final, carry, outputs = before, torch.zeros_like(before[0]), []
    for start in range(0, len(inputs), packed.CHUNK):
        slab = slice(start, start + packed.CHUNK)
        decay = (steps[slab, :, None] * A.float()).exp()
        state = (steps[slab] * inputs[slab])[..., None] * into[slab, None]
        is_first = first[slab].view(-1, 1, 1)
        state = torch.where(is_first, state + decay * before[request[slab]], state)
        decay = torch.where(is_first, 0, decay)
        state[0] += decay[0] * carry
        span = 1
        while span < len(state):  # After this step a token has the sum over twice as many tokens.
            state = torch.cat((state[:span], state[span:] + decay[span:] * state[:-span]))
            decay = torch.cat((decay[:span], decay[span:] * decay[:-span]))
            span *= 2
        outputs.append((state * outof[slab, None]).sum(-1))
        carry, last = state[-1], query_start_loc[1:] - 1 - start
        ends_here = (last >= 0) & (last < len(state))
        final = torch.where(ends_here.view(-1, 1, 1), state[last.clamp(0, len(state) - 1)], final)
    ssm_states[cache_indices] = final.to(ssm_states.dtype)
    return _gated(torch.cat(outputs), inputs, D, z if z is None else z.t()).to(u.dtype).t()


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    dst_state_batch_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Mamba 1 and 2: compute the token of each request, or its token and draft tokens, into
    ``out``.

    Args:
        state: ``[blocks, heads, size, state]``, written; without heads for Mamba 1, as all others.
        x: ``[tokens, heads, size]``.
        dt: ``[tokens, heads, size]``.
        z: ``[tokens, heads, size]``.
        A: ``[heads, size, state]``.
        B: ``[tokens, groups, state]``.
        C: ``[tokens, groups, state]``.
    """
    assert state_batch_indices is not None
    assert out is not None
    inputs, steps = x.float(), _steps(dt, dt_bias, dt_softplus)
    into, outof = B.float(), C.float()
    if x.dim() == 3:
        into, outof = (
            packed.repeat_heads(each, x.shape[1] // each.shape[1]) for each in (into, outof)
        )

    def step(
        before: torch.Tensor, tokens: slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        by = steps[tokens][..., None]
        change = by * inputs[tokens][..., None]
        after = before * (by * A.float()).exp() + change * into[tokens][..., None, :]
        return after, (after * outof[tokens][..., None, :]).sum(-1)

    write = state_batch_indices if dst_state_batch_indices is None else dst_state_batch_indices
    output = torch.zeros_like(inputs)
    packed.decode(state, state_batch_indices, write, cu_seqlens, num_accepted_tokens, output, step)
    return out.copy_(_gated(output, inputs, D, z))


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    steps = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(steps) if softplus else steps


def _gated(
    output: torch.Tensor, inputs: torch.Tensor, factor: torch.Tensor | None, z: torch.Tensor | None
) -> torch.Tensor:
    if factor is not None:
        output = output + inputs * factor.float()
    return output if z is None else output * F.silu(z.float())
