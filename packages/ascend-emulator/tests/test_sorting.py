# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Functions that order or look up values."""

import pytest
import torch

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def distinct(dtype=torch.float32):
    return ((torch.randperm(120) - 60) / 8).to(dtype).view(8, 15)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("descending", [False, True])
def test_sort(agree, descending, dtype):
    x = distinct(torch.float32).mul(8).to(dtype)
    for view in (x, x.t(), x[:0], x[0, 0]):
        agree(lambda x: tuple(torch.sort(x, 0, descending)), view)
        agree(lambda x: torch.argsort(x, -1, descending), view)
    agree(lambda x: tuple(torch.sort(x, dim=-1, descending=descending)), x)


def test_stable_sort_keeps_the_order_of_equal_values(agree):
    agree(lambda x: tuple(torch.sort(x, stable=True, dim=-1)), torch.randint(0, 3, (4, 50)))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("largest", [False, True])
def test_topk(agree, largest, dtype):
    x = distinct(torch.float32).mul(8).to(dtype)
    agree(lambda x: tuple(torch.topk(x, 4, -1, largest)), x)
    agree(lambda x: tuple(torch.topk(x, 4, 0, largest)), x)
    agree(lambda x: tuple(torch.topk(x.t(), 15, 0, largest)), x)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("int32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32], ids=str)
def test_search(agree, right, int32, dtype):
    x = distinct().mul(8).to(dtype)
    rows = x.sort(-1).values
    agree(lambda rows, x: torch.searchsorted(rows, x, right=right, out_int32=int32), rows, x)
    agree(
        lambda row, x: torch.bucketize(x, row, right=right, out_int32=int32),
        rows[0].contiguous(),
        x,
    )
    agree(
        lambda row, x: torch.bucketize(x, row, right=right, out_int32=int32),
        rows[0].contiguous(),
        x[0, 0],
    )


def test_search_for_a_number(agree):
    agree(lambda row: torch.searchsorted(row, 3), torch.tensor([1, 3, 5]))
    agree(lambda row: torch.bucketize(2.5, row, right=True), torch.tensor([1.0, 3.0, 5.0]))


def test_search_with_a_sorter(agree):
    x = distinct()
    agree(lambda x, v: torch.searchsorted(x, v, sorter=x.argsort(-1)), x, x.flip(0).contiguous())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_bincount(agree, dtype):
    x = torch.randint(0, 9, (40,)).to(dtype)
    agree(torch.bincount, x)
    agree(lambda x: torch.bincount(x, minlength=20), x)
    agree(lambda x, w: torch.bincount(x, w), x, torch.rand(40))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_unique(agree, dtype):
    x = torch.randint(0, 9, (6, 7)).to(dtype)
    agree(torch.unique, x)
    agree(lambda x: torch.unique(x, return_inverse=True), x)
    agree(lambda x: torch.unique(x, return_inverse=True, return_counts=True), x)
    agree(lambda x: torch.unique(x, return_counts=True), x.t())
    agree(torch.unique, x[:0])


CASES = {
    "kthvalue": lambda x: tuple(x.kthvalue(3)),
    "bucketize": lambda x: torch.bucketize(
        x, torch.tensor([-1.0, 0, 2], device=x.device).to(x.dtype), right=True
    ),
    "unique": lambda x: torch.ops.aten._unique(x.round(), True, True),
    "unique rows": lambda x: torch.unique(
        x[:, :1].round(), dim=0, return_inverse=True, return_counts=True
    ),
    "unique neighbours": lambda x: torch.unique_consecutive(
        (x > 0).to(x.dtype), return_inverse=True, return_counts=True
    ),
    "unique neighbouring rows": lambda x: torch.unique_consecutive(
        (x[:, :1] > 0).to(x.dtype), dim=0
    ),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(agree, name, dtype):
    if dtype == torch.bfloat16 and name in ("kthvalue", "bucketize"):
        pytest.skip("A3 refuses it (test_strictness.py)")
    agree(CASES[name], ((torch.randperm(24).view(4, 6) - 12) / 4).to(dtype))
