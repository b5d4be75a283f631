# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""References of fused operators: their formulas from torch_npu's documentation, written for float64
on the CPU."""

from __future__ import annotations

from typing import Any

from ascend_emulator.verify.lazy import torch


def rms_norm(x: Any, gamma: Any, eps: float = 1e-6) -> tuple[Any, Any]:
    """The normed rows, and the reciprocal of their root mean square, [..., 1]."""
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * scale * gamma, scale


def add_rms_norm(x: Any, residual: Any, gamma: Any, eps: float = 1e-6) -> tuple[Any, Any, Any]:
    """Norm of the sum, reciprocal root mean square, and the sum."""
    total = x + residual
    return (*rms_norm(total, gamma, eps), total)


def swiglu(x: Any) -> Any:
    """SiLU of the first half of the last dimension, times the second half."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rotate_half(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding with the halves of the last dimension as pairs."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_interleaved(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding with neighbours as pairs."""
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


def quantized_rows(x: Any) -> tuple[Any, Any]:
    """int8 rows and their scales: the largest magnitude of a row is 127."""
    scale = x.abs().amax(-1) / 127
    return (x / scale[..., None]).round().clamp(-128, 127).to(torch.int8), scale


def attention(query: Any, key: Any, value: Any, scale: float, causal: bool = False) -> Any:
    """Softmax attention of [batch, heads, tokens, size]; key heads are repeated for groups of query
    heads."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(
            1 + scores.shape[-1] - scores.shape[-2]
        )
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ value


def paged(cache: Any, table: Any, length: int) -> Any:
    """Keys or values of one request, [1, heads, length, size], from blocks [blocks, block size,
    heads x size] and two heads."""
    rows = cache[table.long()].flatten(0, 1)[:length]
    return rows.view(length, 2, -1).transpose(0, 1)[None]


def top_k_softmax(x: Any, k: int) -> tuple[Any, Any]:
    """The ``k`` largest probabilities of each row and their columns."""
    values, columns = x.softmax(-1).topk(k, -1)
    return values, columns


def grouped_matmul(x: Any, weight: Any, ends: list[int]) -> Any:
    """Rows up to each end times the matrix of that group."""
    starts = [0, *ends[:-1]]
    return torch.cat(
        [
            x[start:end] @ weight[group]
            for group, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
    )


def quant_matmul(x: Any, weight: Any, scale: Any, rows: Any = None) -> Any:
    """Exact product of int8 matrices, times the scales of columns and rows."""
    product = (x.double() @ weight.double()) * scale.double()
    return product if rows is None else product * rows.double()[:, None]


def same(*values: Any) -> tuple[Any, ...]:
    """The values as they are."""
    return values
