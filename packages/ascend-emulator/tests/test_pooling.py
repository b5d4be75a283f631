# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Pooling and its gradients."""

import pytest
import torch
from cann_calls import Calls
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
PLANE, VOLUME = (2, 3, 9, 8), (2, 3, 6, 7, 5)
POOLS = {
    "avg_pool1d": (lambda x: F.avg_pool1d(x[0], 3), PLANE),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3), PLANE),
    "avg_pool2d, padded": (
        lambda x: F.avg_pool2d(x, (3, 2), (2, 1), 1, ceil_mode=True, count_include_pad=False),
        PLANE,
    ),
    "avg_pool2d with a divisor": (lambda x: F.avg_pool2d(x[0], 2, divisor_override=3), PLANE),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2, padding=1), VOLUME),
    "avg_pool3d with a divisor": (
        lambda x: F.avg_pool3d(x, (2, 3, 1), 2, divisor_override=5),
        VOLUME,
    ),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x[0], 5), PLANE),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), PLANE),
    "adaptive_avg_pool2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), PLANE),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (3, 2, 4)), VOLUME),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, padding=1), PLANE),
    "max_pool2d, rounded up": (lambda x: F.max_pool2d(x, 2, (2, 1), ceil_mode=True), PLANE),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2, padding=1), VOLUME),
    "max_pool3d and where": (
        lambda x: _long(F.max_pool3d(x, (2, 3, 2), return_indices=True)),
        VOLUME,
    ),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True), PLANE),
    "adaptive_max_pool3d": (
        lambda x: _long(F.adaptive_max_pool3d(x, (3, 7, 5), return_indices=True)),
        VOLUME,
    ),
}


def _long(result):
    """torch_npu returns the indices in int32."""
    return result[0], result[1].long()


def distinct(shape, dtype=torch.float32):
    """No two values equal, so that the place of each maximum is determined; small enough to be
    exact in float16."""
    numbers = torch.arange(torch.Size(shape).numel())
    return ((numbers * 389 % numbers.numel()) / 4 - 40).view(shape).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_pool(agree_backward, name, dtype):
    function, shape = POOLS[name]
    if dtype != torch.float32 and "avg_pool3d" in name and "adaptive" not in name:
        pytest.skip("PyTorch on the CPU has none to compare with")
    if dtype == torch.bfloat16 and "max" in name:
        shape = (1, 1, *shape[2:])  # No more values than bfloat16 distinguishes.
    agree_backward(
        function,
        distinct(shape, dtype) * (1 if dtype != torch.bfloat16 or "max" not in name else 0.5),
        ulps=16,
    )


def test_unpooling(agree_backward):
    x = distinct(PLANE)
    agree_backward(lambda x: F.max_unpool2d(x, *_places(x, 2), (2, 2)), x[..., :4, :4])
    agree_backward(
        lambda x: F.max_unpool3d(x, *_places(x, 3), (2, 2, 2)), distinct(VOLUME)[..., :2, :2, :2]
    )


def _places(x, dims):
    """Each value goes to the first place of its block."""
    steps = [torch.arange(size) * 2 for size in x.shape[-dims:]]
    flat = torch.zeros((), dtype=torch.long)
    for step in steps:
        flat = flat.unsqueeze(-1) * (2 * len(step)) + step
    return (flat.expand(x.shape).contiguous().to(x.device),)


def test_maxima_with_indices_by_name():
    """Operators of Ascend950 and of use_compatible_impl."""
    calls, x, grad = Calls(), torch.randn(2, 3, 7, 9), torch.randn(2, 3, 4, 5)
    form = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    out, indices, slope = grad.npu(), torch.zeros(2, 3, 4, 5, dtype=torch.int32).npu(), x.npu()
    calls.compute("MaxPool2dWithIndices", x.npu(), *form, out, indices)
    expected, places = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(indices.cpu().long(), places)
    calls.compute("MaxPool2dWithIndicesBackward", grad.npu(), x.npu(), indices, *form, slope)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    torch.testing.assert_close(slope.cpu(), backward(grad, x, *form, places))
    message = calls.refusal("MaxPool2dWithIndices", x.npu(), *form[:3], [2, 2], False, out, indices)
    assert message == "dilation is [2, 2]; it must be 1"
    assert (
        calls.workspace(
            "MaxPool2dWithIndicesBackward", out, x.npu(), indices, [3], *form[1:], x[:1].npu()
        )[0]
        != 0
    )
