# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Batch normalization: whole, and in the parts of its synchronized form, which exist only for
devices."""

import pytest
import torch
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = 1e-3


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 5), (2, 4, 2, 3, 2)], ids=len)
def test_training(agree_backward, shape, dtype):
    x, weight, bias = torch.randn(shape).to(dtype), torch.rand(4), torch.randn(4)

    def call(x, w, b):
        mean, var = (
            torch.zeros(4, dtype=w.dtype, device=w.device),
            torch.ones(4, dtype=w.dtype, device=w.device),
        )
        return (
            F.batch_norm(x, mean, var, w, b, training=True, momentum=0.25, eps=EPSILON),
            mean,
            var,
        )

    agree_backward(call, x, weight, bias, ulps=256 if dtype == torch.float32 else 64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_inference(agree_backward, dtype):
    x, weight, bias, mean, var = (
        torch.randn(2, 4, 3, 5).to(dtype),
        torch.rand(4),
        torch.randn(4),
        torch.randn(4),
        torch.rand(4),
    )
    function = lambda x, w, b: F.batch_norm(x, mean.to(w), var.to(w), w, b, eps=EPSILON)  # noqa: E731
    agree_backward(function, x, weight, bias, ulps=64)


def test_pieces_make_the_whole():
    """Statistics of two parts are those of all, and the pieces of the gradient are autograd's."""
    x, grad, weight, bias = (
        torch.randn(6, 4, 5),
        torch.randn(6, 4, 5),
        torch.rand(4),
        torch.randn(4),
    )
    parts = [x[:2].contiguous(), x[2:].contiguous()]
    means, invstds = zip(
        *(torch.batch_norm_stats(part.npu(), EPSILON) for part in parts), strict=True
    )
    counts = torch.tensor([part.numel() / 4 for part in parts]).npu()
    running_mean, running_var = torch.zeros(4).npu(), torch.ones(4).npu()
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        x.npu(),
        torch.stack(means),
        torch.stack(invstds),
        running_mean,
        running_var,
        0.25,
        EPSILON,
        counts,
    )
    y = torch.batch_norm_elemt(x.npu(), weight.npu(), bias.npu(), mean, invstd, EPSILON)
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
        grad.npu(), x.npu(), mean, invstd, weight.npu(), True, True, True
    )
    grad_x = torch.batch_norm_backward_elemt(
        grad.npu(), x.npu(), mean, invstd, weight.npu(), sum_dy, sum_dy_xmu, counts.int()
    )

    local, slope, offset = (
        x.double().requires_grad_(),
        weight.double().requires_grad_(),
        bias.double().requires_grad_(),
    )
    expected_mean, expected_var = (
        torch.zeros(4, dtype=torch.double),
        torch.ones(4, dtype=torch.double),
    )
    expected = F.batch_norm(
        local, expected_mean, expected_var, slope, offset, training=True, momentum=0.25, eps=EPSILON
    )
    expected.backward(grad.double())
    for ours, theirs in (
        (y, expected),
        (running_mean, expected_mean),
        (running_var, expected_var),
        (grad_x, local.grad),
        (grad_weight, slope.grad),
        (grad_bias, offset.grad),
    ):
        torch.testing.assert_close(ours.cpu().double(), theirs.detach(), atol=1e-5, rtol=1e-5)


def test_sums_make_the_statistics():
    x = torch.randn(6, 4, 5)
    sums, squares = torch.ops.npu.batch_norm_reduce(x.npu(), EPSILON)
    torch.testing.assert_close(sums.cpu().double(), x.double().sum((0, 2)), atol=1e-5, rtol=1e-5)
    running_mean, running_var = torch.zeros(4).npu(), torch.ones(4).npu()
    count = torch.tensor([30], dtype=torch.int32).npu()
    mean, invstd = torch.ops.npu.batch_norm_gather_stats_update(
        x.npu(), sums[None], squares[None], running_mean, running_var, 0.25, EPSILON, count
    )
    torch.testing.assert_close(mean.cpu().double(), x.double().mean((0, 2)), atol=1e-5, rtol=1e-5)
    expected = (x.double().var((0, 2), correction=0) + EPSILON).rsqrt()
    torch.testing.assert_close(invstd.cpu().double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        running_var.cpu().double(), 0.75 + 0.25 * x.double().var((0, 2)), atol=1e-4, rtol=1e-4
    )
