# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Pointwise functions of one tensor."""

import math

import pytest
import torch

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# Function, and the interval its arguments are taken from.
FUNCTIONS = {
    "abs": (-4, 4),
    "acos": (-1, 1),
    "acosh": (1, 9),
    "asin": (-1, 1),
    "asinh": (-4, 4),
    "atan": (-4, 4),
    "atanh": (-0.9, 0.9),
    "ceil": (-4, 4),
    "cos": (-7, 7),
    "cosh": (-3, 3),
    "erf": (-3, 3),
    "erfc": (-3, 3),
    "erfinv": (-0.9, 0.9),
    "exp": (-4, 4),
    "exp2": (-4, 4),
    "expm1": (-4, 4),
    "floor": (-4, 4),
    "frac": (-4, 4),
    "log": (0.01, 9),
    "log10": (0.01, 9),
    "log1p": (-0.9, 9),
    "log2": (0.01, 9),
    "neg": (-4, 4),
    "reciprocal": (0.1, 4),
    "round": (-4, 4),
    "rsqrt": (0.1, 9),
    "sign": (-4, 4),
    "sin": (-7, 7),
    "sinc": (-4, 4),
    "sinh": (-3, 3),
    "sqrt": (0, 9),
    "tan": (-1.2, 1.2),
    "trunc": (-4, 4),
}
ODD = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.5])


def shapes(low, high, dtype):
    """A matrix, its transpose, part of one, a scalar and nothing."""
    x = torch.empty(6, 9).uniform_(low, high).to(dtype)
    return [x, x.t(), x[::2, 1:8:3], x[0, 0], x[:0]]


def strided_out(function):
    """The function with its result written to every second element of a larger tensor."""

    def call(x, *rest):
        whole = torch.full((*x.shape, 2), 7.0, dtype=x.dtype, device=x.device)
        function(x, *rest, out=whole[..., 0])
        return whole

    return call


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(agree, name, dtype):
    for x in shapes(*FUNCTIONS[name], dtype):
        agree(getattr(torch, name), x)
        agree(getattr(torch.Tensor, name + "_"), x)
        agree(strided_out(getattr(torch, name)), x)


@pytest.mark.parametrize(
    "name", ["abs", "exp", "neg", "reciprocal", "rsqrt", "sign", "sqrt", "trunc"]
)
def test_infinities_and_nans_come_through(agree, name):
    agree(getattr(torch, name), ODD)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "name", ["isfinite", "isposinf", "isneginf", "isnan", "isinf", "signbit", "logical_not"]
)
def test_predicate(agree, name, dtype):
    agree(getattr(torch, name), ODD.to(dtype))
    agree(getattr(torch, name), ODD.to(dtype)[3])
    agree(getattr(torch, name), ODD.to(dtype)[:0])


def test_logical_not_in_place(agree):
    agree(torch.Tensor.logical_not_, ODD.nan_to_num(1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "call", [torch.nan_to_num, torch.Tensor.nan_to_num_], ids=["new", "in place"]
)
def test_nan_to_num(agree, call, dtype):
    agree(lambda x: call(x, 2.0, 10.0, -10.0), ODD.to(dtype))
    agree(strided_out(lambda x, out: torch.nan_to_num(x, 2.0, 10.0, -10.0, out=out)), ODD.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_round_to_decimals(agree, dtype):
    for x in shapes(-4, 4, dtype):
        agree(lambda x: torch.round(x, decimals=1), x)
        agree(lambda x: x.round_(decimals=1), x)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str
)
@pytest.mark.parametrize("name", ["abs", "neg", "sign", "bitwise_not"])
def test_whole_numbers(agree, name, dtype):
    if dtype in {
        "neg": (torch.int16, torch.uint8),
        "sign": (torch.int16, torch.int8, torch.uint8),
    }.get(name, ()):
        pytest.skip("A3 refuses it (test_strictness.py)")
    x = torch.randint(0 if dtype == torch.uint8 else -99, 99, (4, 5)).to(dtype)
    agree(getattr(torch, name), x)
    agree(getattr(torch.Tensor, name + "_"), x)


@pytest.mark.parametrize("name", ["bitwise_not", "logical_not"])
def test_truth_values(agree, name):
    agree(getattr(torch, name), torch.tensor([True, False]))
    agree(getattr(torch.Tensor, name + "_"), torch.tensor([True, False]))


@pytest.mark.parametrize("name", ["sqrt", "exp", "log", "sin", "rsqrt", "reciprocal", "erf"])
def test_whole_numbers_become_floats(agree, name):
    agree(getattr(torch, name), torch.arange(1, 9))
    if name not in ("exp", "erf"):  # A3 refuses them (test_strictness.py)
        agree(getattr(torch, name), torch.arange(1, 9, dtype=torch.int32))


def test_sign_of_complex_numbers(agree):
    agree(
        lambda x: torch.view_as_real(torch.sgn(torch.view_as_complex(x))),
        torch.tensor([[3.0, -4], [0, 0], [0, 2]]),
    )


def test_a_negative_threshold_is_refused():
    with pytest.raises(RuntimeError, match="aclnnSoftshrink: lambd is -1; it must not be negative"):
        torch.nn.functional.softshrink(torch.ones(3, device="npu"), -1)
