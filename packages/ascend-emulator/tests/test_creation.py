# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Functions that make or fill a tensor."""

import sys

import pytest
import torch
from torch.nn import functional as F

ALL = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4)])
def test_constant(agree, shape, dtype):
    like = torch.empty(0)
    for function in (torch.zeros, torch.ones):
        agree(lambda x: function(shape, dtype=dtype, device=x.device), like)  # noqa: B023
    agree(lambda x: torch.full(shape, 3, dtype=dtype, device=x.device), like)
    agree(
        lambda x: torch.empty(shape, dtype=dtype, device=x.device).fill_(
            torch.tensor(5, device=x.device)
        ),
        like,
    )
    agree(lambda x: torch.empty(shape, dtype=dtype, device=x.device).zero_(), like)


def test_a_large_tensor_that_is_used_again_is_zeroed():
    """Its pages are handed back instead of written, which must not show."""
    x = torch.full((3 << 20,), 7, dtype=torch.int32, device="npu")
    address = x.data_ptr()
    part = x[5:-3]
    part.zero_()
    assert x[:5].tolist() == [7] * 5
    assert x[-3:].tolist() == [7] * 3
    assert x.sum().item() == 8 * 7
    del x, part
    again = torch.zeros(3 << 20, dtype=torch.int32, device="npu")
    assert again.data_ptr() == address
    assert not again.any().item()
    again += 2
    assert again.sum().item() == 2 * again.numel()


STALE = """
import torch, torch_npu
from torch.multiprocessing.reductions import reduce_tensor
x = torch.ones(3 << 20, device="npu")
if {shared}:
    reduce_tensor(x)  # as sending it to another process does
x[5:-3].zero_()
print(x.sum().item())
print(x.fill_(7).zero_().any().item())
"""


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
@pytest.mark.parametrize(
    "allocator", ["", "expandable_segments:True"], ids=["blocks", "expandable segments"]
)
def test_large_tensors_in_shared_mappings_are_zeroed(run, allocator, shared):
    """Pages of a shared mapping keep their contents in the memory file."""
    done = run(
        "run",
        "--",
        sys.executable,
        "-c",
        STALE.format(shared=shared),
        PYTORCH_NPU_ALLOC_CONF=allocator,
    )
    assert done.stdout.split() == ["8.0", "False"], done.stderr


def test_part_of_a_tensor_is_filled(agree):
    def call(x):
        x[:, ::2] = 1
        x[0].zero_()
        x[:, 1].fill_(2.5)
        x[1:, :1] = torch.tensor(9.0, device=x.device)
        return x

    agree(call, torch.randn(5, 7))
    agree(call, torch.randn(7, 5).t())


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_ranges(agree, dtype):
    like = torch.empty(0)
    if dtype not in (torch.uint8, torch.int8, torch.int16):  # A3 refuses them (test_strictness.py)
        agree(lambda x: torch.arange(9, dtype=dtype, device=x.device), like)
        agree(lambda x: torch.arange(3, 30, 4, dtype=dtype, device=x.device), like)
        agree(lambda x: torch.arange(0, dtype=dtype, device=x.device), like)
    agree(lambda x: torch.range(3, 30, 4, dtype=dtype, device=x.device), like)
    agree(lambda x: torch.linspace(0, 90, 10, dtype=dtype, device=x.device), like)
    agree(lambda x: torch.eye(4, dtype=dtype, device=x.device), like)
    agree(lambda x: torch.eye(3, 5, dtype=dtype, device=x.device), like)


def test_arange_of_fractions(agree):
    agree(lambda x: torch.arange(0, 1, 0.1, device=x.device), torch.empty(0))
    agree(lambda x: torch.arange(10, 0, -3, device=x.device), torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("diagonal", [-1, 0, 2])
def test_triangles(agree, diagonal, dtype):
    x = torch.randint(0, 2, (3, 5, 6)).to(dtype)
    for view in (x, x.transpose(1, 2)):
        agree(lambda x: torch.tril(x, diagonal), view)
        agree(lambda x: torch.triu(x, diagonal), view)
        agree(lambda x: x.tril_(diagonal), view)
        agree(lambda x: x.triu_(diagonal), view)


@pytest.mark.parametrize("wrap", [False, True])
def test_fill_diagonal(agree, wrap):
    agree(lambda x: x.fill_diagonal_(5, wrap), torch.randn(9, 3))


def test_one_hot(agree):
    x = torch.randint(0, 6, (3, 4))
    agree(lambda x: F.one_hot(x, 6), x)
    agree(lambda x: F.one_hot(x, 9), x[0])
    agree(F.one_hot, x)
