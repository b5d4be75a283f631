# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Linear algebra, distances and histograms."""

from fractions import Fraction

import pytest
import torch

CASES = {
    "inverse": torch.inverse,
    "slogdet": lambda a: tuple(torch.slogdet(a)),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "cholesky, upper": lambda a: torch.linalg.cholesky(a @ a.mT, upper=True),
    "cross": lambda a: torch.linalg.cross(a[:3, :3], a[1:4, :3]),
    "qr": lambda a: _product(torch.linalg.qr(a[:, :3])),
    "complete qr": lambda a: _product(torch.linalg.qr(a[:, :3], "complete")),
    "r of qr": lambda a: torch.linalg.qr(a, "r")[1].abs(),
    "svd": lambda a: _assembled(*torch.linalg.svd(a[:, :3], full_matrices=False)),
    "svdvals": torch.linalg.svdvals,
    "triangular solve": lambda a: torch.linalg.solve_triangular(
        a.tril(), a[:, :2].contiguous(), upper=False
    ),
    "pdist": torch.pdist,
    "pdist of order 1": lambda a: torch.pdist(a, 1.0),
    "addr": lambda a: a.clone().addr_(a[0], a[1], beta=0.5, alpha=2),
    "renorm": lambda a: torch.renorm(a, 2, 1, 2.5),
    "renorm in place": lambda a: a.clone().renorm_(1, 0, 3),
    "histc": lambda a: torch.histc(a, 5, -1, 3),
    "logspace": lambda a: torch.logspace(-1, 2, 7, base=3.0, device=a.device),
    "complex": lambda a: torch.view_as_real(torch.complex(a, a.mT.contiguous())),
    "polar": lambda a: torch.view_as_real(torch.polar(a.abs(), a)),
}


def _product(factors):
    return factors[0] @ factors[1]


def _assembled(u, s, v):
    return (u * s) @ v, s


def test_renorm_of_order_zero():
    """By the number of elements that are not 0, which ATen does not take for an order on
    the CPU."""
    a = torch.tensor([[3.0, 0, 0, 0], [1, 2, 0, 4], [0, 0, 0, 0]])
    expected = a * torch.tensor([[1], [2 / 3], [1]])
    torch.testing.assert_close(torch.renorm(a.npu(), 0, 0, 2.0).cpu(), expected)
    torch.testing.assert_close(a.npu().renorm_(0, 0, 2.0).cpu(), expected)


@pytest.mark.parametrize("name", CASES)
def test_case(agree, name):
    # Its condition number is small, so that an inverse is accurate.
    a = torch.randn(5, 5) / 4 + torch.diag(torch.arange(1.0, 6.0))
    agree(CASES[name], a, ulps=512)


def counted(values, bins, least, highest):
    """A histogram in exact arithmetic: bins are half open, except the last one."""
    least, highest = (min(values), max(values)) if least == highest and values else (least, highest)
    least, highest = (least - 1, highest + 1) if least == highest else (least, highest)
    result = [0] * bins
    for value in values:
        if least <= value <= highest:
            place = (
                (Fraction(value) - Fraction(least)) * bins / (Fraction(highest) - Fraction(least))
            )
            result[min(int(place), bins - 1)] += 1
    return result


EXPERTS = torch.randint(0, 60, (4096,)).tolist()
HISTOGRAMS = {
    "experts of tokens": (EXPERTS, 60, 0, 59),
    "values outside of the range": ([-9, 0, 1, 2, 7, 8, 3], 4, 0, 7),
    "the range of the values": ([5, -3, 2, 2], 3, 0, 0),
    "the range of one value": ([4, 4, 4], 5, 0, 0),
    "an empty tensor": ([], 4, 0, 3),
    "an empty tensor, no range": ([], 4, 0, 0),
    "a range that is not integral": ([0, 1, 2, 3, 4], 4, 0.5, 3.5),
    "more than float32 tells apart": ([2**24, 2**24 + 1, 2**31 - 1, -(2**31)], 7, 2**24, 2**24 + 1),
    "all of int32": ([-(2**31), -1, 0, 2**31 - 1], 2, -(2**31), 2**31 - 1),
}


@pytest.mark.parametrize("case", HISTOGRAMS)
def test_histogram_of_integers(case):
    """As transformers counts the tokens of experts."""
    values, bins, least, highest = HISTOGRAMS[case]
    x = torch.tensor(values, dtype=torch.int32, device="npu")
    out = torch.zeros(bins, dtype=torch.int32, device="npu")
    for result in (
        torch.histc(x, bins, least, highest),
        torch.histc(x, bins, least, highest, out=out),
    ):
        assert result.dtype == torch.int32
        assert result.tolist() == counted(values, bins, least, highest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_histogram_of_floats(dtype):
    """Values within bins: to which of two bins a value on their border belongs is not
    documented."""
    x = (torch.randint(-40, 60, (500,)).to(dtype) + 0.5) / 4
    for bins, least, highest in ((25, -10, 15), (5, -5, 0), (4, 20, 22)):
        result = torch.histc(x.npu(), bins, least, highest)
        assert result.dtype == dtype
        assert result.tolist() == counted(x.tolist(), bins, least, highest)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float64, torch.bfloat16],
)
def test_histograms_of_other_dtypes_are_refused(dtype):
    name = {
        torch.int64: "Long",
        torch.int16: "Short",
        torch.int8: "Char",
        torch.uint8: "Byte",
        torch.bool: "Bool",
    }
    name |= {torch.float64: "Double", torch.bfloat16: "BFloat16"}
    with pytest.raises(
        RuntimeError,
        match=rf"aclnnHistc: self is {name[dtype]} \(DT_\w+\); allowed: Half, Float, Int",
    ):
        torch.histc(torch.ones(3, dtype=dtype).npu(), 4, 0, 3)


def test_outputs_of_histograms_that_are_refused(calls):
    x, out = torch.ones(3, dtype=torch.int32).npu(), torch.zeros(4, dtype=torch.int32).npu()
    assert calls.refusal("Histc", x, 0, 0.0, 3.0, out) == "bins is 0; it must be positive"
    assert "out has shape [4]" in calls.refusal("Histc", x, 5, 0.0, 3.0, out)
    assert "out is Float (DT_FLOAT)" in calls.refusal("Histc", x, 4, 0.0, 3.0, out.float())
