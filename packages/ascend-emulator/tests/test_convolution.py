# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Convolutions and their gradients."""

import pytest
import torch
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# Shapes of input, weight and bias, and the function. Values are small whole numbers, so that sums
# are exact.
CASES = {
    "conv1d": ([(2, 4, 11), (6, 4, 3), (6,)], lambda x, w, b: F.conv1d(x, w, b, padding=1)),
    "conv1d, dilated": (
        [(2, 4, 11), (6, 2, 3), (6,)],
        lambda x, w, b: F.conv1d(x, w, b, stride=2, dilation=2, groups=2),
    ),
    "conv2d": (
        [(2, 4, 7, 6), (6, 4, 3, 2), (6,)],
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 0)),
    ),
    "conv2d, one image": ([(4, 7, 6), (6, 4, 3, 3), (6,)], F.conv2d),
    "conv2d, depthwise": (
        [(2, 4, 7, 6), (4, 1, 3, 3), (4,)],
        lambda x, w, b: F.conv2d(x, w, b, groups=4),
    ),
    "conv2d without a bias": ([(2, 4, 7, 6), (6, 4, 3, 3)], F.conv2d),
    "conv3d": (
        [(2, 2, 4, 5, 6), (3, 2, 2, 3, 2), (3,)],
        lambda x, w, b: F.conv3d(x, w, b, padding=1),
    ),
    "conv_transpose1d": (
        [(2, 4, 5), (4, 3, 3), (3,)],
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, output_padding=1),
    ),
    "conv_transpose2d": (
        [(2, 4, 5, 4), (4, 3, 3, 2), (6,)],
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, groups=2),
    ),
    "conv_transpose3d": (
        [(1, 2, 3, 4, 3), (2, 3, 2, 2, 2), (3,)],
        lambda x, w, b: F.conv_transpose3d(x, w, b, stride=2),
    ),
    "conv_tbc": ([(9, 2, 4), (3, 4, 5), (5,)], lambda x, w, b: torch.conv_tbc(x, w, b, 1)),
    "unfold": ([(2, 3, 8, 7)], lambda x: F.unfold(x, (3, 2), dilation=2, padding=1, stride=2)),
    "fold": ([(2, 12, 20)], lambda x: F.fold(x, (6, 5), (2, 2))),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_convolution(agree_backward, name, dtype):
    shapes, function = CASES[name]
    agree_backward(function, *(torch.randint(-2, 3, shape).to(dtype) for shape in shapes), ulps=1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_depthwise_by_its_own_name(agree, dtype):
    x, w = (
        torch.randint(-2, 3, (2, 4, 7, 6)).to(dtype),
        torch.randint(-2, 3, (4, 1, 3, 3)).to(dtype),
    )

    def depthwise(x, w):
        if x.is_npu:
            return torch.ops.aten._conv_depthwise2d(x, w, [3, 3], None, [1, 1], [0, 0], [1, 1])
        return F.conv2d(x, w, groups=4)

    agree(depthwise, x, w, ulps=1)


def test_a_kernel_of_no_size_is_refused():
    with pytest.raises(
        RuntimeError,
        match=r"aclnnConvolution: weight has the shape \[1, 1, 0, 1, 1\]; no dimension may be 0",
    ):
        F.conv_transpose3d(torch.ones(1, 1, 1, 1, 1).npu(), torch.ones(1, 1, 0, 1, 1).npu())


def test_convolution_of_nnpack():
    x, w, b = (torch.randint(-2, 3, shape).float() for shape in [(2, 4, 7, 6), (6, 4, 3, 3), (6,)])
    actual = torch._nnpack_spatial_convolution(x.npu(), w.npu(), b.npu(), (2, 1))
    assert torch.equal(actual.cpu(), F.conv2d(x, w, b, padding=(2, 1)))


def hf32(x):
    """Rounded to 11 bits of mantissa, ties to even, in float64 (CANN's documentation of
    ENABLE_HF32_EXECUTION)."""
    fraction, exponent = torch.frexp(x.double())
    return torch.ldexp((fraction * 2**12).round(), exponent - 12)


def relative(actual, expected):
    return ((actual.cpu().double() - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture
def in_float32():
    """Convolutions in float32's own precision (torch.npu.conv.allow_hf32 is True by default)."""
    torch.npu.conv.allow_hf32 = False
    yield
    torch.npu.conv.allow_hf32 = True


def gradients(function, *tensors):
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    return out, *torch.autograd.grad(out, tensors, out.detach() / 8)


def test_float32_is_multiplied_in_hf32():
    x, w, b = torch.randn(2, 48, 9, 8), torch.randn(16, 48, 3, 3), torch.randn(16)
    expected = F.conv2d(hf32(x), hf32(w), b.double())
    actual = F.conv2d(x.npu(), w.npu(), b.npu())
    assert relative(actual, expected) < 1e-6
    assert 1e-5 < relative(actual, F.conv2d(x.double(), w.double(), b.double())) < 1e-3


def test_gradients_in_float32_are_multiplied_in_hf32():
    x, w, b = torch.randn(2, 16, 9, 8), torch.randn(8, 16, 3, 3), torch.randn(8)
    out, *slopes = gradients(F.conv2d, x.npu(), w.npu(), b.npu())
    grad = out.detach().cpu() / 8
    wide = hf32(x).requires_grad_(), hf32(w).requires_grad_()
    expected = torch.autograd.grad(F.conv2d(*wide), wide, hf32(grad))
    # the bias's is a plain sum
    for slope, reference in zip(slopes, [*expected, grad.double().sum((0, 2, 3))], strict=True):
        assert relative(slope, reference) < 1e-6


def test_float32_keeps_its_precision_where_hf32_is_not_allowed(in_float32):
    torch.manual_seed(0)
    tensors = torch.randn(2, 16, 9, 8), torch.randn(8, 16, 3, 3), torch.randn(8)
    expected = gradients(F.conv2d, *(x.double() for x in tensors))
    for ours, theirs in zip(
        gradients(F.conv2d, *(x.npu() for x in tensors)), expected, strict=True
    ):
        assert relative(ours.detach(), theirs.detach()) < 1e-6
