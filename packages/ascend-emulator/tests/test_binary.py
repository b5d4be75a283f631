# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Pointwise functions of two tensors, or of a tensor and a number."""

import operator

import pytest
import torch

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ALL = [*FLOATS, torch.int64, torch.int32]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
# Method, and whether its in-place form exists.
ARITHMETIC = ["add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
BITS = ["bitwise_and", "bitwise_or", "bitwise_xor"]
SHIFTS = ["bitwise_left_shift", "bitwise_right_shift"]
LOGICAL = ["logical_and", "logical_or", "logical_xor"]


def values(*shape, dtype):
    """From 1 to 6, so that no quotient or power is out of range; in quarters, so that every type
    holds them."""
    quarters = torch.randint(4, 25, shape)
    return (quarters / 4).to(dtype) if dtype.is_floating_point else (quarters % 5 + 1).to(dtype)


def pairs(dtype, other=None):
    """Equal shapes, transposed, broadcast both ways, steps, scalars, nothing."""
    a, b = values(6, 9, dtype=dtype), values(6, 9, dtype=other or dtype)
    yield a, b
    yield a, b.t().contiguous().t()
    yield a, b[0]
    yield a, b[:, :1]
    yield a[:, ::3], b[:, 1:4]
    yield a, b[1, 1]
    yield a[0, 0], b[1, 1]
    yield a[:0], b[:0]


def methods(name):
    return getattr(torch.Tensor, name), getattr(torch.Tensor, name + "_")


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(agree, name, dtype):
    new, in_place = methods(name)
    ulps = 8 if name in ("pow", "remainder", "fmod") else 2
    for a, b in pairs(dtype):
        agree(new, a, b, ulps=ulps)
        agree(new, b, a, ulps=ulps)
        if dtype.is_floating_point or name != "div":
            agree(in_place, a, b, ulps=ulps)
    number = 2.5 if dtype.is_floating_point else 2
    agree(new, a, number, ulps=ulps)
    a, b = next(pairs(dtype))
    agree(new, a, number, ulps=ulps)
    if dtype.is_floating_point or name != "div":
        agree(in_place, a, number, ulps=ulps)


@pytest.mark.parametrize("name", ["add", "sub"])
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_multiple_of_the_second(agree, name, dtype):
    new, in_place = methods(name)
    for a, b in pairs(dtype):
        agree(lambda x, y: new(x, y, alpha=3), a, b)
        agree(lambda x, y: in_place(x, y, alpha=3), a, b)
    agree(lambda x: new(x, 5, alpha=3), a)
    agree(lambda x: in_place(x, 5, alpha=3), a)
    agree(lambda x: torch.rsub(x, 5, alpha=3), a)
    agree(lambda x, y: torch.rsub(x, y, alpha=3), a, b)


@pytest.mark.parametrize(
    "name",
    [
        "add",
        "sub",
        "mul",
        "div",
        "remainder",
        "maximum",
        "minimum",
        "eq",
        "lt",
        "floor_divide",
        "pow",
    ],
)
@pytest.mark.parametrize(
    "types",
    [
        (torch.int64, torch.float32),
        (torch.int32, torch.int64),
        (torch.float16, torch.float32),
        (torch.uint8, torch.int64),
    ],
    ids=str,
)
def test_types_are_promoted(agree, name, types):
    if name == "remainder" and torch.uint8 in types:
        pytest.skip("A3 refuses it (test_strictness.py)")
    for a, b in pairs(*types):
        agree(getattr(torch, name), a, b)


@pytest.mark.parametrize("name", ["add", "mul", "maximum", "eq", "lt"])
@pytest.mark.parametrize("other", [torch.bool, torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_truth_values_take_part(agree, name, other):
    a, b = torch.rand(6, 9) > 0.5, (torch.rand(6, 9) > 0.5).to(other)
    agree(getattr(torch, name), a, b)
    agree(getattr(torch, name), b, a)


@pytest.mark.parametrize(
    "function",
    [
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        operator.floordiv,
        operator.mod,
        operator.pow,
    ],
)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_number_on_the_left(agree, function, dtype):
    agree(lambda x: function(7, x), values(3, 4, dtype=dtype), ulps=8)


@pytest.mark.parametrize("mode", [None, "trunc", "floor"])
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_division_with_rounding(agree, mode, dtype):
    a, b = values(6, 9, dtype=dtype) * 5, -values(6, 9, dtype=dtype)
    agree(lambda x, y: torch.div(x, y, rounding_mode=mode), a, b)
    agree(lambda x: torch.div(x, -3, rounding_mode=mode), a)
    if mode or dtype.is_floating_point:
        agree(lambda x, y: x.div_(y, rounding_mode=mode), a, b)
        agree(lambda x: x.div_(-3, rounding_mode=mode), a)


def test_remainder_has_the_sign_of_the_divisor_fmod_the_other(agree):
    a, b = torch.tensor([7.0, -7.0, 7.0, -7.0]), torch.tensor([3.0, 3.0, -3.0, -3.0])
    for function in (torch.remainder, torch.fmod):
        agree(function, a, b)
        agree(function, a.long(), b.long())
    assert torch.remainder(a.npu(), b.npu()).tolist() == [1.0, 2.0, -2.0, -1.0]


@pytest.mark.parametrize("dtype", [*ALL, torch.bool], ids=str)
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison(agree, name, dtype):
    new, in_place = methods(name)
    for a, b in pairs(dtype):
        agree(new, a, b)
        agree(in_place, a, b)
        agree(new, a, 3)
        agree(in_place, a, 3)


@pytest.mark.parametrize("dtype", [*WHOLE, torch.bool], ids=str)
@pytest.mark.parametrize("name", BITS)
def test_bits(agree, name, dtype):
    new, in_place = methods(name)
    number = True if dtype == torch.bool else 6
    for a, b in pairs(dtype):
        agree(new, a, b)
        agree(in_place, a, b)
        agree(new, a, number)
        agree(in_place, a, number)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@pytest.mark.parametrize("name", SHIFTS)
def test_shifts(agree, name, dtype):
    new, in_place = methods(name)
    for a, b in pairs(dtype):
        agree(new, a, b % 4)
        agree(in_place, a, b % 4)
        agree(new, a, 2)
        agree(in_place, a, 2)
    agree(operator.lshift, a, 2)
    agree(operator.ilshift, a, 2)
    agree(operator.rshift, a, 2)
    agree(operator.irshift, a, 2)


@pytest.mark.parametrize("name", SHIFTS)
def test_shift_of_another_dtype_is_refused(name):
    """An NPU ends with an AI CPU exception."""
    values = torch.arange(4, dtype=torch.int32).npu()
    for shift in (torch.tensor(1).npu(), torch.ones(4, dtype=torch.int64).npu()):
        with pytest.raises(RuntimeError, match=r"shift is Long \(DT_INT64\) and self is Int"):
            getattr(torch, name)(values, shift)
    assert torch.ones(1).npu().item() == 1


def test_whole_numbers_times_a_fraction_in_place():
    """As an NPU takes int64; other integers, and other operators, have no such evidence."""
    x = torch.arange(-3, 4).npu()
    assert torch.equal(x.mul_(0.5).cpu(), torch.tensor([-1, -1, 0, 0, 0, 1, 1]))
    for call in (lambda: x.int().mul_(0.5), lambda: x.add_(0.5)):
        with pytest.raises(
            RuntimeError, match="result type Float can't be cast to the desired output type"
        ):
            call()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", LOGICAL)
def test_logical(agree, name, dtype):
    new, in_place = methods(name)
    for a, b in pairs(dtype):
        agree(new, a % 2, b % 3) if dtype != torch.bool else agree(new, a, ~b)
        agree(in_place, a, b)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("function", [torch.maximum, torch.minimum, torch.max, torch.min])
def test_larger_and_smaller(agree, function, dtype):
    for a, b in pairs(dtype):
        agree(function, a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_atan2(agree, dtype):
    for a, b in pairs(dtype):
        agree(torch.atan2, a - 3, b - 3)
        agree(torch.Tensor.atan2_, a - 3, b - 3)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_clamp(agree, dtype):
    for a, b in pairs(dtype):
        for low, high in ((2, 4), (None, 4), (2, None)):
            agree(lambda x: torch.clamp(x, low, high), a)  # noqa: B023
            agree(lambda x: x.clamp_(low, high), a)  # noqa: B023
        agree(lambda x, y: torch.clamp(x, y, y + 1), a, b)
        agree(lambda x, y: torch.clamp(x, max=y), a, b)
        agree(lambda x, y: torch.clamp(x, min=y), a, b)
        agree(lambda x, y: torch.clamp_min(x, y), a, b)
        agree(lambda x, y: torch.clamp_max(x, y), a, b)
        agree(lambda x, y: x.clamp_min_(y), a, b)
        agree(lambda x, y: x.clamp_max_(y), a, b)
        agree(lambda x: torch.clamp_min(x, 3), a)
        agree(lambda x: torch.clamp_max(x, 3), a)
        agree(lambda x: x.clamp_max_(3), a)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_three_tensors(agree, dtype):
    for a, b in pairs(dtype):
        c = a.flip(0) if a.dim() else a + 1
        agree(lambda x, y, z: torch.addcmul(x, y, z, value=0.5), a, b, c)
        agree(lambda x, y, z: x.addcmul_(y, z, value=0.5), a, b, c)
        agree(lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), a, b, c)
        agree(lambda x, y, z: x.addcdiv_(y, z, value=0.5), a, b, c)
        agree(torch.lerp, a, b, c)
        agree(torch.Tensor.lerp_, a, b, c)
        agree(lambda x, y: torch.lerp(x, y, 0.25), a, b)
        agree(lambda x, y: x.lerp_(y, 0.25), a, b)
        agree(lambda x, y, z: torch.where(x > z, y, z), a, b, c)
        agree(lambda x, y: torch.where(x > y, x, 0.0), a, b)


@pytest.mark.parametrize("name", ["add", "mul", "div", "eq", "maximum", "pow"])
def test_result_in_a_strided_output(agree, name):
    def call(x, y):
        whole = torch.zeros(
            *x.shape, 2, dtype=torch.float32 if name != "eq" else torch.bool, device=x.device
        )
        getattr(torch, name)(x, y, out=whole[..., 1])
        return whole.float()

    agree(call, values(4, 5, dtype=torch.float32), values(4, 5, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [*ALL, torch.bool], ids=str)
def test_equality_of_whole_tensors(dtype):
    a = values(3, 4, dtype=dtype).npu()
    assert torch.equal(a, a.clone())
    assert not torch.equal(a, ~a if dtype == torch.bool else a + 1)
    assert not torch.equal(a, a[:2])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_closeness(agree, dtype):
    a = torch.tensor([1.0, 1.0, torch.nan, torch.inf, 0.0], dtype=dtype)
    b = torch.tensor([1.0, 1.5, torch.nan, torch.inf, 1e-3], dtype=dtype)
    for nan in (False, True):
        agree(lambda x, y: torch.isclose(x, y, rtol=1e-3, atol=1e-2, equal_nan=nan), a, b)  # noqa: B023
    assert torch.allclose(a[:1].npu(), b[:1].npu())


def test_number_no_less_than_a_tensor(agree):
    agree(lambda x: torch.ge(torch.tensor(2.0), x), torch.tensor([1.0, 2.0, 3.0]))


def test_floor_division_of_truth_values(agree):
    agree(lambda x: torch.floor_divide(x, 1.0), torch.tensor([True, False, True]))


def test_what_self_cannot_hold_is_refused():
    with pytest.raises(
        RuntimeError,
        match="result type Float can't be cast to the desired output type Long of self",
    ):
        torch.ones(3, dtype=torch.int64, device="npu").add_(torch.ones(3, device="npu"))


SETS = {
    "isin a number": lambda x: torch.isin(x, 0.25),
    "a number isin": lambda x: torch.isin(0.25, x),
    "gcd": lambda x: torch.gcd((x * 8).int(), torch.tensor(12, dtype=torch.int32, device=x.device)),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_isin_and_gcd(agree, name, dtype):
    agree(SETS[name], ((torch.randperm(24).view(4, 6) - 12) / 4).to(dtype))
