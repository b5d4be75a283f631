# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Operators of a project in Python, for test_operators.py."""

from torch import Tensor


def aclnnScaleCustom(
    x: Tensor,
    bias: Tensor | None,
    factors: list[float],
    shift: int,
    scale: float,
    twice: bool,
    out: Tensor,
):
    """x * scale * factors + bias + shift, perhaps twice as much."""
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias has shape {list(bias.shape)}")
    result = x * scale * x.new_tensor(factors) + shift
    out.copy_((result if bias is None else result + bias) * (2 if twice else 1))


def aclnnConcatCustom(tensors: list[Tensor], mode: str, out: Tensor):
    """The tensors' rows, in this or in reverse order."""
    rows = [row for tensor in tensors for row in tensor]
    for place, row in zip(out, rows if mode == "forward" else rows[::-1], strict=True):
        place.copy_(row)
