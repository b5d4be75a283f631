# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Experts as grouped matmuls: rows sorted by expert, and the weighted sum of each token's expert
outputs."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from ascend_platform.chips import ChipFamily, chip

Matmul = Callable[[torch.Tensor], torch.Tensor]


@functools.cache
def chip_family() -> ChipFamily:
    """The family of this process's NPU."""
    return chip().family


def run_experts(
    w13: torch.Tensor,
    w2: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    lora: Any = None,
    activation: Matmul = torch_npu.npu_swiglu,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Apply experts to rows sorted by expert; output rows after those of the last expert are
    undefined.

    Args:
        w13: ``[experts, 2 * inner, hidden]``, gate and up projections, or ``[experts, inner,
            hidden]`` without a gate.
        w2: ``[experts, hidden, inner]``, down projection.
        rows: ``[rows, hidden]``.
        counts: int64 ``[experts]``, rows per expert.
        lora: adapters of the rows (``ascend_platform.lora.experts.RowLoRA``), or None.
        activation: of the first matmul, whose result becomes ``[rows, inner]``.
        biases: of both matmuls, ``[experts, 2 * inner]`` and ``[experts, hidden]``, in float32 for
            bfloat16 rows; or None.
    """
    first, second = ({} if bias is None else {"bias": bias} for bias in biases)
    return with_adapters(
        lambda rows: grouped_matmul(rows, w13.transpose(1, 2), counts, **first),
        activation,
        lambda inner: grouped_matmul(inner, w2.transpose(1, 2), counts, **second),
        rows,
        counts,
        lora,
    )


def with_adapters(
    first: Matmul, activation: Matmul, second: Matmul, rows: torch.Tensor, counts: Any, lora: Any
) -> torch.Tensor:
    """Apply two matmuls of experts, each with the output of ``lora`` unless that is None; see
    :func:`run_experts`."""
    gate_up = first(rows)
    if lora is not None:
        lora.add_w13(gate_up, rows, counts)
    inner = activation(gate_up)
    expert_out = second(inner)
    if lora is not None:
        lora.add_w2(expert_out, inner, counts)
    return expert_out


def grouped_matmul(
    rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Multiply each expert's rows by its matrix; rows ``[rows, in]``, weight ``[experts, in,
    out]``, result ``[rows, out]``.

    Args:
        counts: int64 ``[experts]``, rows per expert.
        options: arguments of npu_grouped_matmul; tensors are wrapped in lists.
    """
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            options[name] = [value]
    groups = {"group_type": 0, "group_list": counts, "group_list_type": group_list_type(counts)}
    return torch_npu.npu_grouped_matmul([rows], [weight], split_item=2, **groups, **options)[0]


def group_list_type(counts: torch.Tensor) -> int:
    """``group_list_type`` of counts: a single group is supported only as a cumulative sum, which
    equals its count."""
    return 0 if len(counts) == 1 else 1


def combine(
    expert_out: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, has_dropped: bool
) -> torch.Tensor:
    """Compute the weighted sum of each token's expert outputs, ``[tokens, hidden]``.

    Args:
        expert_out: ``[tokens * k, hidden]``, sorted by expert; dropped rows come last, with any
            values; the last becomes zeros.
        row_idx: int32 ``[tokens * k]``, the row of each copy of a token; -1, of another rank's
            expert, becomes the last one.
        topk_weights: ``[tokens, k]``, float32 or of the model's dtype.
        has_dropped: whether there may be dropped rows.
    """
    # A chip without expert parallelism. Only expert parallelism drops rows.
    if not chip_family().token_unpermute:
        inputs = (expert_out, None, None, None, topk_weights.to(expert_out.dtype), row_idx, None)
        return torch_npu.npu_moe_finalize_routing(*inputs, drop_pad_mode=2)
    if has_dropped:
        # If any row is dropped, the last row belongs to no expert and serves as the zeros of all
        # dropped rows. Weights of 0 are not enough, because 0 times the contents of such a row can
        # be NaN.
        dropped, last = row_idx < 0, len(expert_out) - 1
        expert_out[last:].masked_fill_(dropped.any(), 0)
        row_idx.masked_fill_(dropped, last)
    return torch_npu.npu_moe_token_unpermute(expert_out, row_idx, probs=topk_weights)
