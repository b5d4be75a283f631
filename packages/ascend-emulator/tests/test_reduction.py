# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Functions that reduce or scan over dimensions."""

import pytest
import torch

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# One line each: what is done to a [5, 6, 7] tensor without equal values. Index results must be
# exact.
REDUCTIONS = {
    "sum": torch.sum,
    "sum over dims": lambda x: x.sum((0, 2)),
    "sum, kept": lambda x: x.sum(1, keepdim=True),
    "sum in float32": lambda x: x.sum(-1, dtype=torch.float32),
    "nansum": lambda x: torch.where(x > 0, x, torch.nan).nansum(-1),
    "mean": torch.mean,
    "mean over dims": lambda x: x.mean((0, -1), keepdim=True),
    "mean in float32": lambda x: x.mean(-1, dtype=torch.float32),
    "prod": lambda x: (x / 40 + 1).prod(),
    "prod over a dim": lambda x: (x / 40 + 1).prod(1, keepdim=True),
    "max": torch.max,
    "min": torch.min,
    "max and where": lambda x: tuple(x.max(1)),
    "min and where": lambda x: tuple(x.min(-1, keepdim=True)),
    "amax": lambda x: x.amax((0, 2)),
    "amin": lambda x: x.amin(1, keepdim=True),
    "aminmax": lambda x: tuple(torch.aminmax(x)),
    "aminmax over a dim": lambda x: tuple(torch.aminmax(x, dim=1)),
    "argmax": torch.argmax,
    "argmax over a dim": lambda x: x.argmax(-1, keepdim=True),
    "argmin": torch.argmin,
    "argmin over a dim": lambda x: x.argmin(0),
    "cummax": lambda x: tuple(torch.cummax(x, 1)),
    "cummin": lambda x: tuple(torch.cummin(x, 1)),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum in place": lambda x: x.cumsum_(0),
    "cumsum in float32": lambda x: x.cumsum(1, dtype=torch.float32),
    "cumprod": lambda x: (x / 40 + 1).cumprod(1),
    "var": torch.var,
    "var over dims": lambda x: x.var((0, 2), correction=0, keepdim=True),
    "var and mean": lambda x: torch.var_mean(x, (1, 2)),
    "std": torch.std,
    "std over a dim": lambda x: x.std(1, correction=0),
    "std and mean": lambda x: torch.std_mean(x, -1, keepdim=True),
    "norm": torch.norm,
    "norm of order 1": lambda x: torch.norm(x, 1, dim=(0, 1)),
    "norm of order 3": lambda x: torch.norm(x, 3.0, dim=1),
    "norm of dims": lambda x: torch.ops.aten.norm(x, 2, [1], True),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, dim=(0, 2), keepdim=True),
    "vector_norm of all": torch.linalg.vector_norm,
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "logsumexp, kept": lambda x: x.logsumexp(-1, keepdim=True),
    "any": lambda x: (x > 10).any(),
    "any over a dim": lambda x: (x > 10).any(1, keepdim=True),
    "all": lambda x: (x > -10).all(),
    "all over a dim": lambda x: (x > -10).all(-1),
    "median": torch.median,
    "trace": lambda x: x[0].trace(),
}


def distinct(dtype):
    """No two values equal, and all exact in every type, so that indices of extremes are
    determined."""
    return ((torch.randperm(210) - 105) / 8).to(dtype).view(5, 6, 7)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(agree, name, dtype):
    if dtype == torch.bfloat16 and name in ("var and mean", "median"):
        pytest.skip("A3 refuses it (test_strictness.py)")
    if (
        name == "trace"
        and dtype != torch.float32
        and torch.__version__.startswith(("2.10.", "2.11.", "2.12."))
    ):
        pytest.skip("this PyTorch has no trace of 16-bit types on the CPU to compare with")
    x = distinct(dtype)
    for view in (x, x.transpose(0, 2), x[1:, ::2]):
        # Sums of two hundred values: the error of each in a narrow type stays below a unit of the
        # largest partial sum.
        agree(REDUCTIONS[name], view, ulps=64 if "prod" in name else 16)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["sum", "sum over dims", "cumsum", "any", "all", "max", "amax"])
def test_whole_numbers(agree, name, dtype):
    agree(
        REDUCTIONS[name],
        (
            (distinct(torch.float32) * 8).to(dtype)
            if dtype != torch.bool
            else distinct(torch.float32) > 0
        ),
    )


@pytest.mark.parametrize(
    "name", ["max and where", "min and where", "argmax", "argmin over a dim", "cummax"]
)
def test_extremes_of_whole_numbers(agree, name):
    agree(REDUCTIONS[name], (distinct(torch.float32) * 8).long())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scalars_and_nothing(agree, dtype):
    scalar, nothing = torch.tensor(2.5, dtype=dtype), torch.empty(0, 3, dtype=dtype)
    for function in (
        torch.sum,
        torch.mean,
        torch.max,
        torch.argmax,
        torch.prod,
        lambda x: x.cumsum(0),
        lambda x: x.amax(0),
        lambda x: x.any(),
    ):
        agree(function, scalar)
    for function in (
        torch.sum,
        torch.prod,
        lambda x: x.sum(0),
        lambda x: x.sum(1),
        lambda x: x.amax(1),
        lambda x: x.cumsum(0),
        lambda x: x.any(),
        lambda x: x.all(),
    ):
        agree(function, nothing)


def test_means_of_narrow_types_are_taken_in_float32(agree):
    agree(torch.mean, torch.full((4096,), 30.0, dtype=torch.float16), ulps=1)
    agree(lambda x: x.sum(-1), torch.full((4, 2000), 1.0, dtype=torch.bfloat16), ulps=1)


def test_result_in_a_strided_output(agree):
    def call(x):
        whole = torch.zeros(5, 7, 2, dtype=x.dtype, device=x.device)
        torch.sum(x, 1, out=whole[..., 0])
        torch.amax(x, 1, out=whole[..., 1])
        return whole

    agree(call, distinct(torch.float32), ulps=16)


MEDIANS = {
    "median": lambda x: tuple(x.median(0)),
    "nanmedian": lambda x: torch.where(x > 0, x, torch.nan).nanmedian(),
    "nanmedian over a dim": lambda x: tuple(torch.where(x > -3, x, torch.nan).nanmedian(1)),
    "aminmax": lambda x: tuple(torch._aminmax(x)),
    "aminmax of a dim": lambda x: tuple(torch._aminmax(x, 1)),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", MEDIANS)
def test_medians_and_aminmax(agree, name, dtype):
    if dtype == torch.bfloat16 and name == "nanmedian":
        pytest.skip("A3 refuses it (test_strictness.py)")
    agree(MEDIANS[name], ((torch.randperm(24).view(4, 6) - 12) / 4).to(dtype))
