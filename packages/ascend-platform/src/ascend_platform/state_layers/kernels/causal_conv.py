# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Causal convolution over packed tokens with a state per request, in PyTorch.

CANN's operators for it take width 3 only, and are for another chip (``npu_fused_causal_conv1d``).
Nothing here waits for the device: sequence lengths and indices stay there. Block 0 is vLLM's null
block, whose rows are left as they are.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ascend_platform.state_layers.kernels import packed


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | bool | None = "silu",
    **_: Any,
) -> torch.Tensor:
    """Convolve whole sequences or chunks of them, and keep the last inputs of each.

    Replaces ``vllm.model_executor.layers.mamba.ops.causal_conv1d.causal_conv1d_fn``.

    Args:
        x: ``[channels, tokens]``, requests one after the other.
        weight: ``[channels, width]``.
        conv_states: ``[blocks, channels, at least width - 1]``, written.
        query_start_loc: ``[requests + 1]``, the first token of each request.
        cache_indices: ``[requests]``, the block of a request.
        has_initial_state: ``[requests]``, whether the block holds earlier tokens.

    Returns:
        ``[channels, tokens]``.
    """
    dtype, tokens, kept = x.dtype, x.t().to(conv_states.dtype), weight.shape[1] - 1
    rows_of = _Rows.of(len(tokens), query_start_loc, has_initial_state, kept)
    states = conv_states.transpose(1, 2)[:, :kept]
    history = states[cache_indices].masked_fill_(rows_of.is_new, 0).flatten(0, 1)
    rows = tokens.new_empty(len(tokens) + len(history), tokens.shape[1])
    rows.index_copy_(0, rows_of.histories, history)
    rows.index_copy_(0, rows_of.tokens, tokens)
    states[cache_indices] = rows.index_select(0, rows_of.last).view(-1, kept, rows.shape[1])
    output = convolve(rows[None], weight, bias, activation)[0]
    return output.index_select(0, rows_of.tokens_without_first).to(dtype).t()


class _Rows(NamedTuple):
    """Rows of packed requests, for each its history, then its tokens.

    Attributes:
        histories: of the ``kept`` inputs before each request, ``[requests * kept]``.
        tokens: of the step's tokens, ``[tokens]``.
        tokens_without_first: ``kept`` lower than ``tokens``.
        last: of the last ``kept`` inputs of each request.
        is_new: whether a request has no history, ``[requests, 1, 1]``.
    """

    histories: torch.Tensor
    tokens: torch.Tensor
    tokens_without_first: torch.Tensor
    last: torch.Tensor
    is_new: torch.Tensor

    @classmethod
    def of(
        cls, tokens: int, query_start_loc: torch.Tensor, has_history: torch.Tensor, kept: int
    ) -> "_Rows":
        """The rows of a step, which ``query_start_loc`` keeps for its other layers."""
        version = 0 if query_start_loc.is_inference() else query_start_loc._version
        key = f"_rows {kept} {tokens} {version}"
        if (known := vars(query_start_loc).get(key)) is not None:
            return known
        device, requests = query_start_loc.device, len(query_start_loc) - 1
        offsets = torch.arange(requests * kept, device=device).view(requests, kept)
        first = query_start_loc[:-1, None] + offsets
        position = torch.arange(tokens, device=device)
        before = position + packed.requests_of(tokens, query_start_loc) * kept
        last = (first + query_start_loc.diff()[:, None]).flatten()
        is_new = ~has_history.view(-1, 1, 1)
        rows = cls(first.flatten(), before + kept, before, last, is_new)
        vars(query_start_loc)[key] = rows
        return rows


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    out: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Convolve the token of each request, or its token and draft tokens.

    Replaces ``vllm.model_executor.layers.mamba.ops.causal_conv1d.causal_conv1d_update``. With draft
    tokens a state has the inputs of the last step, and `num_accepted_tokens` tells how many of them
    count.

    Args:
        x: ``[tokens, channels]``; without `query_start_loc` a token for each request.
        conv_state: ``[blocks, channels, length]``, written.
        conv_state_indices: ``[requests]``, or ``[requests, tokens]``, where the first counts.
        out: the result's place, or None for a new tensor.
    """
    assert conv_state_indices is not None
    index = conv_state_indices if conv_state_indices.dim() == 1 else conv_state_indices[:, 0]
    kept, requests, dtype = weight.shape[1] - 1, len(index), x.dtype
    tokens = x.to(conv_state.dtype)
    states = conv_state.transpose(1, 2)
    state = states.index_select(0, index)
    if query_start_loc is None:
        steps, history, new = 1, state[:, :kept], tokens.view(requests, 1, -1)
    else:
        steps, device = max_query_len, x.device
        starts = query_start_loc[:requests]
        place = (starts[:, None] + torch.arange(steps, device=device)).clamp_max(len(tokens) - 1)
        new = tokens[place.flatten()].view(requests, steps, -1)
        history = state[:, :kept]
        if num_accepted_tokens is not None:
            offset = (num_accepted_tokens[:requests, None] - 1).clamp_min(0) + torch.arange(
                kept, device=device
            )
            history = state.gather(1, offset.long()[..., None].expand(-1, -1, state.shape[2]))
    window = torch.cat((history, new), 1)
    output = convolve(window, weight, bias, activation)
    length = kept + steps - 1
    states[index, :length] = torch.where(
        (index > 0).view(-1, 1, 1), window[:, 1 : 1 + length], state[:, :length]
    )
    if query_start_loc is None:
        output = output[:, 0]
    else:
        request = packed.requests_of(len(tokens), query_start_loc[: requests + 1])
        step = (torch.arange(len(tokens), device=x.device) - query_start_loc[request]).clamp(
            0, steps - 1
        )
        output = output.flatten(0, 1)[request * steps + step]
    output = output.to(dtype)
    return output if out is None else out.copy_(output)


def convolve(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | bool | None,
) -> torch.Tensor:
    """The rows ``[requests, rows, channels]``, each with the ``width - 1`` before it; in float32,
    without the first."""
    width = weight.shape[1]
    length = rows.shape[1] - width + 1
    weights = weight.t().float()
    if length == 1:
        output = (rows * weights).sum(1, keepdim=True)
    else:
        rows = rows.float()
        output = rows[:, :length] * weights[0]
        for each in range(1, width):
            output = torch.addcmul(output, rows[:, each : each + length], weights[each])
    if bias is not None:
        output = output + bias.float()
    return F.silu(output) if activation in (True, "silu", "swish") else output
