# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Comparisons of NPU tensors with float64 results, and inputs of quantized operators."""

import torch


def close(actual, expected, ulps=4):
    """Within ``ulps`` roundings of the dtype, absolutely and relatively."""
    bound = ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(
        actual.detach().cpu().double(), expected.detach().double(), atol=bound, rtol=bound
    )


def close_sums(actual, expected, ulps=2):
    """Within ``ulps`` roundings of the largest value: sums that cancel are as inexact."""
    bound = ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(
        actual.cpu().double(),
        expected,
        atol=bound * max(1.0, expected.abs().max().item()),
        rtol=bound,
    )


def close_numbers(actual, expected, tolerance=1e-5):
    """Within a tolerance, absolutely and relatively."""
    torch.testing.assert_close(actual.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def same_integers(actual, wide, lowest, highest):
    """Rounded values: where float32 and float64 fall on different sides of a tie, they may differ
    by one."""
    actual, expected = actual.cpu().double(), wide.round().clamp(lowest, highest)
    near_tie = ((wide - wide.floor()) - 0.5).abs() < 1e-3
    assert actual.shape == expected.shape
    assert torch.equal(actual[~near_tie], expected[~near_tie])
    assert ((actual - expected).abs() <= 1)[near_tie].all()


def on_npu(value):
    """A tensor, or those of a list, on the NPU; anything else as it is."""
    if isinstance(value, list):
        return [on_npu(each) for each in value]
    return value.npu() if isinstance(value, torch.Tensor) else value


def integers(*shape, low=-128, high=128):
    """Random int8 values."""
    return torch.randint(low, high, shape, dtype=torch.int8)


def int4(*shape):
    """Values of four bits, and the same packed into int32 words."""
    values = torch.randint(-8, 8, shape, dtype=torch.int8)
    pairs = values.view(torch.uint8)
    return values, ((pairs[..., ::2] & 15) | (pairs[..., 1::2] << 4)).contiguous().view(torch.int32)


def packed(values):
    """int4 values [..., 8 n] -> int32 [..., n], the first in the lowest bits."""
    fields = (values.long() & 15).unflatten(-1, (-1, 8))
    words = sum(fields[..., i] << (4 * i) for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpacked(words):
    """int32 [..., n] -> the eight int4 values of each, [..., 8 n], the lowest bits first."""
    fields = torch.stack([(words.cpu().long() >> (4 * i)) & 15 for i in range(8)], -1).flatten(-2)
    return torch.where(fields > 7, fields - 16, fields)
