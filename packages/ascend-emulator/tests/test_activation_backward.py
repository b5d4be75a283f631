# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Activations, softmax and normalizations that are not elsewhere, and their gradients."""

import pytest
import torch
import torch_npu
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "mish": F.mish,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 1.5),
    "relu": F.relu,
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "celu in place": lambda x: F.celu(x * 1, 0.7, inplace=True),
    "glu": lambda x: F.glu(x, 0),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "logsigmoid": F.logsigmoid,
    "logit": lambda x: torch.logit(x.abs() / 8, 0.01),
    "logit without bounds": lambda x: torch.logit(x.abs() / 8 + 0.05),
    "softplus": lambda x: F.softplus(x, 2, 1),
    "softshrink": lambda x: F.softshrink(x, 0.4),
    "hardshrink": lambda x: F.hardshrink(x, 0.4),
    "threshold": lambda x: F.threshold(x, 0.3, 0.2),
    "softmax": lambda x: F.softmax(x, 1),
    "log_softmax": lambda x: F.log_softmax(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "group_norm": lambda x: F.group_norm(x.reshape(2, 4, 3), 2),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(
        torch.tensor([1, 0, 2, 3], device=x.device), dim=0
    ),
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
    "logaddexp2": lambda x: torch.logaddexp2(x, x.flip(0)),
    "xlogy": lambda x: torch.xlogy(x, x.abs() + 0.5),
    "xlogy with a number": lambda x: torch.xlogy(x, 2.5),
    "xlogy of a number": lambda x: torch.xlogy(2.5, x.abs() + 0.5),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(agree_backward, name, dtype):
    # Off the corners of the piecewise functions, and exact in every type.
    agree_backward(
        FUNCTIONS[name], (torch.randperm(24).view(4, 6).to(dtype) - 12) / 8 + 1 / 32, ulps=64
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_with_parameters(agree_backward, dtype):
    x, weight, bias = torch.randn(4, 6).to(dtype), torch.rand(6).to(dtype), torch.randn(6).to(dtype)
    agree_backward(lambda x, w, b: F.layer_norm(x, (6,), w, b), x, weight, bias, ulps=64)
    agree_backward(lambda x, w, b: F.group_norm(x.view(2, 6, 2), 3, w, b), x, weight, bias, ulps=64)
    agree_backward(F.prelu, x, weight)
    agree_backward(F.prelu, x, weight[:1])


def test_gelu_of_the_npu(agree):
    """torch_npu's own functions, from their documentation: x * sigmoid(1.702 x)."""
    x, grad = torch.randn(4, 6), torch.randn(4, 6)

    def slopes(x, grad):
        if x.is_npu:
            return torch_npu.npu_fast_gelu(x), torch.ops.npu.npu_fast_gelu_backward(grad, x)
        x = x.requires_grad_()
        y = x * torch.sigmoid(1.702 * x)
        return y.detach(), torch.autograd.grad(y, x, grad)[0]

    agree(slopes, x, grad, ulps=16)

    def exact(x, grad):
        if x.is_npu:
            return torch.ops.npu.npu_gelu_backward(grad, x, approximate="none")
        x = x.requires_grad_()
        return torch.autograd.grad(F.gelu(x), x, grad)[0]

    agree(exact, x, grad, ulps=16)


def test_distances(agree):
    a, b = torch.randn(5, 3), torch.randn(4, 3)
    for p in (1.0, 2.0, 3.0, torch.inf):
        agree(
            lambda x, y, p=p: torch.cdist(x, y, p, compute_mode="donot_use_mm_for_euclid_dist"),
            a,
            b,
            ulps=64,
        )


def test_embedding(agree_backward):
    table = torch.randn(7, 3)
    agree_backward(
        lambda t: F.embedding(torch.tensor([[1, 2], [2, 6]], device=t.device), t, padding_idx=1),
        table,
    )
    agree_backward(
        lambda t: F.embedding(torch.tensor([1, 2, 2], device=t.device), t, scale_grad_by_freq=True),
        table,
    )


def test_pieces_of_other_functions(agree):
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    agree(lambda x, y: torch.ops.aten._add_relu(x, y, alpha=2), x, y)
    agree(lambda x, y: torch.ops.aten._add_relu_(x, y, alpha=2), x, y)
    agree(torch.angle, x)
    agree(lambda x: x.xlogy_(3.0), x)
    agree(lambda x: torch.threshold_(x, 0.3, 0.2), x)
    agree(
        lambda x: (
            torch.ops.aten._masked_scale(x, (x > 0).byte(), 2.0) if x.is_npu else x * (x > 0) * 2.0
        ),
        x,
    )


def test_leaky_slopes_are_drawn_and_kept():
    x = torch.full((2000,), -1.0).npu()
    for in_place in (False, True):
        slopes = -F.rrelu(x.clone(), 0.25, 0.5, training=True, inplace=in_place)
        assert 0.25 <= slopes.min() < 0.26 < 0.49 < slopes.max() <= 0.5
    assert torch.equal(F.rrelu(x, 0.25, 0.5).cpu(), torch.full((2000,), -0.375))
