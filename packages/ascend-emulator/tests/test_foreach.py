# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Operators on lists of tensors."""

import pytest
import torch

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
UNARY = [
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "log",
    "log10",
    "log1p",
]
UNARY += [
    "log2",
    "neg",
    "reciprocal",
    "round",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "pow"]
SHAPES = [(3, 4), (5,), (2, 1, 3)]


def values(dtype, low=0.1, high=0.9):
    return [(low + (high - low) * torch.rand(shape)).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(agree, name, dtype):
    agree(getattr(torch, f"_foreach_{name}"), values(dtype), ulps=16)
    agree(_in_place(getattr(torch, f"_foreach_{name}_")), values(dtype), ulps=16)


def test_abs_of_bools():
    """Atlas A3 passes PyTorch's test of it; PyTorch on CPUs has no such kernel."""
    x = torch.tensor([True, False]).npu()
    assert torch._foreach_abs([x])[0].tolist() == x.abs().tolist() == [True, False]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(agree, name, dtype):
    new, in_place = (
        getattr(torch, f"_foreach_{name}"),
        _in_place(getattr(torch, f"_foreach_{name}_")),
    )
    a, b = values(dtype), values(dtype, 1, 3)
    for function in (new, in_place):
        agree(function, a, b, ulps=16)
        agree(function, a, 1.5, ulps=16)
        agree(function, a, [0.5, 1.5, 2.0], ulps=16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_three_lists(agree, name, dtype):
    new, in_place = (
        getattr(torch, f"_foreach_{name}"),
        _in_place(getattr(torch, f"_foreach_{name}_")),
    )
    lists = values(dtype), values(dtype), values(dtype, 1, 3)
    for function in (new, in_place):
        agree(lambda *x: function(*x, 0.5), *lists, ulps=16)  # noqa: B023
        agree(lambda *x: function(*x, [0.5, 1.5, 2.0]), *lists, ulps=16)  # noqa: B023
        agree(lambda *x: function(*x, torch.tensor([0.5, 1.5, 2.0])), *lists, ulps=16)  # noqa: B023


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_others(agree, dtype):
    a, b, weight = values(dtype), values(dtype), values(dtype)
    agree(lambda x, y: torch._foreach_add(x, y, alpha=2), a, b)
    agree(lambda x, y: torch._foreach_sub(x, y, alpha=2), a, b)
    agree(torch._foreach_lerp, a, b, weight)
    agree(lambda x, y: torch._foreach_lerp(x, y, 0.25), a, b)
    agree(lambda x: torch._foreach_pow(1.5, x), a, ulps=16)
    agree(_in_place(torch._foreach_copy_), a, b)
    agree(_in_place(torch._foreach_zero_), a)
    for order in (1, 2):
        agree(lambda x: torch._foreach_norm(x, order), a, ulps=16)  # noqa: B023


def test_gradients_are_unscaled_and_checked():
    gradients = [torch.tensor([2.0, 4.0]).npu(), torch.tensor([8.0]).npu()]
    result, scale = torch.zeros(1).npu(), torch.tensor([0.5]).npu()
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, result, scale)
    assert [gradient.tolist() for gradient in gradients] == [[1.0, 2.0], [4.0]]
    assert result.item() == 0
    torch._amp_foreach_non_finite_check_and_unscale_(
        [torch.tensor([torch.inf]).npu()], result, scale
    )
    assert result.item() == 1


def test_scale_of_mixed_precision():
    scale, tracker = torch.tensor([8.0]).npu(), torch.zeros(1, dtype=torch.int32).npu()
    for actual, expected in ((0.0, 8.0), (0.0, 16.0), (1.0, 8.0)):
        torch._amp_update_scale_(scale, tracker, torch.tensor([actual]).npu(), 2.0, 0.5, 2)
        assert scale.item() == expected


def _in_place(function):
    def call(x, *rest):
        function(x, *rest)
        return x

    return call
