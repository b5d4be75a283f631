# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The gated delta rule of linear attention layers (Qwen3-Next, Qwen3.5, OLMo-hybrid) by CANN's
operators.

Their ranges are those of op-plugin's pages for CANN 9.1 (branch 26.1.0), and for strengths those of
its later page of npu_chunk_gated_delta_rule. That also has decays of -1 to 0, beyond which results
may overflow: those of trained weights are far below, and vllm-ascend passes them unchecked (pull
request 12647). Both operators have states in bfloat16, and on some chips npu_chunk_gated_delta_rule
in float32 too; of float32 states those that a step touches are cast elsewhere.
"""

import functools
from typing import Any

import torch
import torch_npu
from ascend_platform import extension

OPERATORS = {"prefill": "npu_chunk_gated_delta_rule", "decode": "npu_recurrent_gated_delta_rule"}
DECODE_SIZES = range(1, 513)
HEADS = {"prefill": 64, "decode": 256}
TOKENS = 8
"""Of a request in a decode: one, and its draft tokens."""

MAX_REQUESTS = 4096


class FusedGatedDeltaRule:
    """The rule by CANN's operators."""

    operators = OPERATORS

    @staticmethod
    def unsupported(
        phase: str,
        *,
        heads: int,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        tokens: int,
        chunk_sizes: range,
        doubles_strengths: bool = False,
    ) -> str:
        """Why a layer's ``prefill`` or ``decode`` is not supported, "" if it is.

        Args:
            heads: of values.
            sizes: of a key and of a value.
            tokens: of a request in a decode.
            chunk_sizes: of keys and values that npu_chunk_gated_delta_rule takes on this chip.
            doubles_strengths: whether strengths reach 2.
        """
        if state_dtype not in (torch.bfloat16, torch.float32):
            return f"states are {_name(state_dtype)}, supported: bfloat16 and float32"
        if dtype != torch.bfloat16:
            return f"the operators take bfloat16, not {_name(dtype)}"
        allowed = chunk_sizes if phase == "prefill" else DECODE_SIZES
        if any(size not in allowed for size in sizes):
            return (
                f"keys and values of {sizes[0]} and {sizes[1]}, {OPERATORS[phase]} takes"
                f" {allowed[0]} to {allowed[-1]}"
            )
        if heads > HEADS[phase]:
            return f"{heads} heads, {OPERATORS[phase]} takes up to {HEADS[phase]}"
        if phase == "prefill" and doubles_strengths:
            return f"strengths above 1, {OPERATORS[phase]} takes 0 to 1"
        if phase == "decode" and tokens > TOKENS:
            return f"{tokens - 1} draft tokens, {OPERATORS[phase]} takes up to {TOKENS - 1}"
        return ""

    @staticmethod
    def prefill(
        inputs: extension.GatedDeltaInputs,
        states: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``ascend_platform.state_layers.kernels.gated_delta.chunk_rule``."""
        return torch_npu.npu_chunk_gated_delta_rule(
            inputs.q,
            inputs.k,
            inputs.v.contiguous(),
            beta=inputs.beta.bfloat16(),
            initial_state=states if _takes_float32() else states.bfloat16(),
            actual_seq_lengths=_sizes(query_start_loc),
            scale=inputs.scale,
            g=inputs.g.contiguous(),
        )

    @staticmethod
    def decode(
        inputs: extension.GatedDeltaInputs,
        states: torch.Tensor,
        indices: torch.Tensor,
        query_start_loc: torch.Tensor | None,
        num_accepted_tokens: torch.Tensor | None,
        may_pad: bool = True,
    ) -> torch.Tensor:
        """As ``ascend_platform.state_layers.kernels.gated_delta.recurrent_rule``.

        The operator requires requests of equal size and rejects empty ones. Padding tokens repeat
        the previous state.
        """
        v, requests, device = inputs.v, len(indices), inputs.v.device
        named: dict[str, torch.Tensor] = {}
        if indices.dim() == 1 or query_start_loc is None:
            steps, blocks = 1, indices if indices.dim() == 1 else indices[:, 0]
            rows: Any = slice(0, requests)
            positions, is_padding = rows, blocks <= 0 if may_pad else None
        else:
            steps, blocks = indices.shape[1], indices.flatten()
            starts, each = query_start_loc[:requests, None], torch.arange(steps, device=device)
            exists = (each < query_start_loc[: requests + 1].diff()[:, None]).flatten()
            rows = (starts + each).clamp_max(len(v) - 1).flatten()
            positions, is_padding = torch.where(exists, rows, len(v)), ~exists | (blocks <= 0)
            if num_accepted_tokens is not None:
                named["num_accepted_tokens"] = num_accepted_tokens[:requests].clamp(1, steps).int()
        g, beta = inputs.g[rows], inputs.beta[rows]
        if is_padding is not None:
            g, beta = (each.masked_fill(is_padding[:, None], 0) for each in (g, beta))
        in_place = states.dtype == torch.bfloat16 and states.is_contiguous()
        in_place = in_place and len(states) >= len(blocks)
        index = blocks.int() if in_place else _numbers(device)[: len(blocks)]
        used = states if in_place else states.index_select(0, blocks).bfloat16()
        result = torch_npu.npu_recurrent_gated_delta_rule(
            *(each[rows].bfloat16() for each in (inputs.q, inputs.k)),
            v[rows].contiguous(),
            used,
            beta=beta.bfloat16(),
            scale=inputs.scale,
            actual_seq_lengths=_constant(steps, device)[:requests],
            ssm_state_indices=index,
            g=g.float(),
            **named,
        )
        if not in_place:
            states.index_copy_(0, blocks, used.to(states.dtype))
        if positions is rows and len(v) == requests:
            return result
        output = v.new_zeros(len(v) + 1, *v.shape[1:])
        output[positions] = result
        return output[:-1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(query_start_loc: torch.Tensor) -> torch.Tensor:
    """Sequence lengths, which ``query_start_loc`` keeps for the step's other layers."""
    version = 0 if query_start_loc.is_inference() else query_start_loc._version
    kept = vars(query_start_loc)
    if (known := kept.get("_sizes")) is None or known[0] != version:
        known = kept["_sizes"] = version, query_start_loc.diff().int()
    return known[1]


@functools.cache
def _takes_float32() -> bool:
    return extension.chip().family.chunk_rule_float32


@functools.cache
def _numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(MAX_REQUESTS * TOKENS, dtype=torch.int32, device=device)


@functools.cache
def _constant(value: int, device: torch.device) -> torch.Tensor:
    return torch.full((MAX_REQUESTS,), value, dtype=torch.int32, device=device)
