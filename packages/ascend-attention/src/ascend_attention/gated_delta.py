# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The gated delta rule of linear attention layers (Qwen3-Next, Qwen3.5, OLMo-hybrid) by CANN's
operators.

Their ranges are those of ``torch_npu/_op_plugin_docs.py``, and for decays and strengths those of
op-plugin's documentation of npu_chunk_gated_delta_rule: its results may overflow beyond them. A
layer's decays have no lower bound, so the host waits for the least of each prefill, until one is
out of range: from then on the built-in serves the layer's prefills, without waits.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from ascend_platform import extension

OPERATORS = {"prefill": "npu_chunk_gated_delta_rule", "decode": "npu_recurrent_gated_delta_rule"}
SIZES = {"prefill": range(128, 129), "decode": range(1, 257)}
HEADS = {"prefill": 64, "decode": 256}
TOKENS = 8
"""Of a request in a decode: one, and its draft tokens."""

LEAST_DECAY = -1.0


class FusedGatedDeltaRule:
    """The rule of one layer; ``built_in`` computes prefills that are out of range."""

    operators = OPERATORS

    def __init__(self, built_in: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._built_in, self._in_range = built_in, True

    @staticmethod
    def unsupported(
        phase: str,
        *,
        heads: int,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        tokens: int,
    ) -> str:
        """Why a layer's ``prefill`` or ``decode`` is not supported, "" if it is.

        Args:
            heads: of values.
            sizes: of a key and of a value.
            tokens: of a request in a decode.
        """
        if state_dtype != torch.bfloat16:
            return (
                f"states are {_name(state_dtype)}, the operators take bfloat16"
                " (--mamba-ssm-cache-dtype)"
            )
        if dtype != torch.bfloat16:
            return f"the operators take bfloat16, not {_name(dtype)}"
        if any(size not in SIZES[phase] for size in sizes):
            allowed = SIZES[phase]
            return (
                f"keys and values of {sizes[0]} and {sizes[1]}, {OPERATORS[phase]} takes"
                f" {allowed[0]} to {allowed[-1]}"
            )
        if heads > HEADS[phase]:
            return f"{heads} heads, {OPERATORS[phase]} takes up to {HEADS[phase]}"
        if phase == "decode" and tokens > TOKENS:
            return f"{tokens - 1} draft tokens, {OPERATORS[phase]} takes up to {TOKENS - 1}"
        return ""

    def prefill(
        self,
        inputs: extension.GatedDeltaInputs,
        states: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``ascend_platform.kernels.states.gated_delta.chunk_rule``."""
        g, beta = inputs.g, inputs.beta
        if self._in_range and not ((g.amin() >= LEAST_DECAY) & (beta.amax() <= 1)).item():
            self._in_range = False
            _say_out_of_range()
        if not self._in_range:
            return self._built_in(inputs, states, query_start_loc)
        return torch_npu.npu_chunk_gated_delta_rule(
            inputs.q,
            inputs.k,
            inputs.v.contiguous(),
            beta=beta.bfloat16(),
            initial_state=states,
            actual_seq_lengths=query_start_loc.diff().int(),
            scale=inputs.scale,
            g=g.contiguous(),
        )

    @staticmethod
    def decode(
        inputs: extension.GatedDeltaInputs,
        states: torch.Tensor,
        indices: torch.Tensor,
        query_start_loc: torch.Tensor | None,
        num_accepted_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """As ``ascend_platform.kernels.states.gated_delta.recurrent_rule``.

        The operator requires requests of equal size and rejects empty ones. Padding tokens repeat
        the previous state.
        """
        v, requests, device = inputs.v, len(indices), inputs.v.device
        named: dict[str, torch.Tensor] = {}
        if indices.dim() == 1 or query_start_loc is None:
            steps, blocks = 1, indices if indices.dim() == 1 else indices[:, 0]
            rows: Any = slice(0, requests)
            positions, exists = rows, blocks > 0
        else:
            steps, blocks = indices.shape[1], indices.flatten()
            starts, each = query_start_loc[:requests, None], torch.arange(steps, device=device)
            exists = (each < query_start_loc[: requests + 1].diff()[:, None]).flatten()
            rows = (starts + each).clamp_max(len(v) - 1).flatten()
            positions, exists = torch.where(exists, rows, len(v)), exists & (blocks > 0)
            if num_accepted_tokens is not None:
                named["num_accepted_tokens"] = num_accepted_tokens[:requests].clamp(1, steps).int()
        g, beta = (torch.where(exists[:, None], each[rows], 0) for each in (inputs.g, inputs.beta))
        in_place = states.is_contiguous() and len(states) >= len(blocks)
        index = (
            blocks.int()
            if in_place
            else torch.arange(len(blocks), dtype=torch.int32, device=device)
        )
        used = states if in_place else states[blocks]
        result = torch_npu.npu_recurrent_gated_delta_rule(
            *(each[rows].bfloat16() for each in (inputs.q, inputs.k)),
            v[rows].contiguous(),
            used,
            beta=beta.bfloat16(),
            scale=inputs.scale,
            actual_seq_lengths=torch.full((requests,), steps, dtype=torch.int32, device=device),
            ssm_state_indices=index,
            g=g.float(),
            **named,
        )
        if not in_place:
            states[blocks] = used
        if positions is rows and len(v) == requests:
            return result
        output = v.new_zeros(len(v) + 1, *v.shape[1:])
        output[positions] = result
        return output[:-1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _say_out_of_range() -> None:
    extension.logger.info(
        "the built-in gated delta rule serves prefills of layers with decays below %s or strengths"
        " above 1, for which npu_chunk_gated_delta_rule may overflow",
        LEAST_DECAY,
    )
