# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Functions that move values without computing on them."""

import pytest
import torch
from cann_calls import Calls
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ALL = [*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
MOVES = {
    "clone": torch.clone,
    "contiguous": lambda x: x.transpose(0, 2).contiguous(),
    "permute": lambda x: x.permute(2, 0, 1).clone(memory_format=torch.contiguous_format),
    "cat": lambda x: torch.cat([x, x[:1], x[:0]], 0),
    "cat of transposed": lambda x: torch.cat([x, x], -1),
    "cat of one": lambda x: torch.cat([x], 1),
    "stack": lambda x: torch.stack([x, x.flip(0)], 1),
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "expand": lambda x: x[:1].expand(4, -1, -1).clone(),
    "tile": lambda x: x.tile((2,)),
    "flip": lambda x: x.flip((0, 2)),
    "roll": lambda x: x.roll((1, -2), (0, 2)),
    "roll of all": lambda x: x.roll(3),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=1),
    "negative pad": lambda x: F.pad(x, (-1, 2)),
    "split": lambda x: [part.clone() for part in x.split((1, 2, 3), 2)],
    "repeat_interleave": lambda x: x.repeat_interleave(3),
    "repeat_interleave of a dim": lambda x: x.repeat_interleave(3, 1),
    "repeat_interleave by tensor": lambda x: x.repeat_interleave(
        torch.tensor([0, 2, 1, 4], device=x.device), 0
    ),
    "repeat_interleave of all by tensor": lambda x: x[0, 0].repeat_interleave(
        torch.arange(6, device=x.device)
    ),
    "tril": lambda x: x.tril(-1),
    "triu": lambda x: x.triu(1),
    "copy to strided": lambda x: torch.zeros_like(x).repeat(1, 1, 2)[..., ::2].copy_(x),
    "copy broadcast": lambda x: torch.zeros_like(x).copy_(x[:, :1]),
    "view of a view": lambda x: x[1:, ::2].transpose(1, 2).reshape(-1),
}


def tensor(dtype):
    return torch.randint(0, 2 if dtype == torch.bool else 100, (4, 5, 6)).to(dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_move(agree, name, dtype):
    x = tensor(dtype)
    agree(MOVES[name], x)
    agree(MOVES[name], tensor(dtype).permute(2, 0, 1).contiguous().permute(1, 2, 0))


@pytest.mark.parametrize("target", ALL, ids=str)
@pytest.mark.parametrize("source", ALL, ids=str)
def test_cast(agree, source, target):
    x = tensor(source)
    for view in (x, x.transpose(0, 2), x[0, 0, 0], x[:0]):
        agree(lambda x: x.to(target), view)
    agree(lambda x: torch.zeros(4, 5, 6, dtype=target, device=x.device).copy_(x), x)


def test_cast_rounds_to_nearest_even(agree):
    agree(
        lambda x: x.to(torch.bfloat16),
        torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.0e38]),
        ulps=0,
    )
    agree(lambda x: x.to(torch.float16), torch.tensor([2049.0, 2051.0, 65519.0, 65520.0]), ulps=0)
    agree(lambda x: x.to(torch.int32), torch.tensor([1.9, -1.9, 0.5]))


def test_reinterpreted_bits():
    x = torch.tensor([[1.0], [-2.0]])
    assert torch.equal(x.npu().view(torch.int32).clone().cpu(), x.view(torch.int32))
    assert torch.equal(
        x.bfloat16().npu().view(torch.uint8).clone().cpu(), x.bfloat16().view(torch.uint8)
    )


def test_no_chip_but_950_computes_in_float8():
    x = torch.tensor([1.0, -2.0, 448.0]).to(torch.float8_e4m3fn)
    assert torch.equal(x.npu().cpu().float(), x.float())  # bytes are copied
    for call in (
        lambda: x.npu().float(),
        lambda: torch.ones(3, device="npu").to(torch.float8_e4m3fn),
    ):
        with pytest.raises(RuntimeError, match="161002"):
            call()
    assert torch.equal(x.view(torch.uint8).npu().int().cpu(), x.view(torch.uint8).int())


SPLITS = {
    "channel_shuffle": lambda x: torch.channel_shuffle(x.view(1, 4, 6, 1), 2),
    "split into copies": lambda x: tuple(torch.split_with_sizes_copy(x, [1, 2, 3], 1)),
    "chunk_cat": lambda x: torch._chunk_cat([x, x[:3]], 0, 2),
    "repeat_interleave of counts": lambda x: torch.repeat_interleave(
        torch.tensor([2, 0, 3], device=x.device)
    ),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPLITS)
def test_split_and_repeat(agree, name, dtype):
    agree(SPLITS[name], ((torch.randperm(24).view(4, 6) - 12) / 4).to(dtype))


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape).int()


def test_split_into_given_tensors():
    calls, x = Calls(), torch.randn(4, 6)
    outs = [torch.zeros(4, width).npu() for width in (1, 3, 2)]
    calls.compute("SplitWithSize", x.npu(), [1, 3, 2], -1, outs)
    assert all(
        torch.equal(out.cpu(), part) for out, part in zip(outs, x.split([1, 3, 2], 1), strict=True)
    )
    assert (
        calls.refusal("SplitWithSize", x.npu(), [1, 2, 3], 1, outs)
        == "out has shape [4, 3]; it must be [4, 2]"
    )
    assert "splitSize has the sum 4" in calls.refusal("SplitWithSize", x.npu(), [1, 3], 1, outs[:2])


@pytest.mark.parametrize(
    ("begin", "end", "strides", "masks", "expected"),
    [
        ([1, 0, 1], [3, 4, 3], [1, 2, 1], (0, 0, 0, 0, 0), lambda x: x[1:3, 0:4:2, 1:3]),
        ([1, 2], [9, 0], [], (1, 2, 0, 0, 0), lambda x: x[:9, 2:]),
        ([0, -2], [0, -1], [1, 1], (0, 0, 1, 0, 0), lambda x: x[..., -2:-1]),
        ([0, 0, -1], [0, 2, 0], [1, 1, 1], (0, 0, 0, 1, 4), lambda x: x[None, 0:2, -1]),
    ],
)
def test_strided_slice(begin, end, strides, masks, expected):
    calls, x = Calls(), numbers(3, 4, 5)
    out = torch.zeros_like(expected(x)).npu()
    calls.compute("StridedSlice", x.npu(), begin, end, strides, *masks, out)
    assert torch.equal(out.cpu(), expected(x))
    small = torch.zeros(1, dtype=torch.int32).npu()
    assert "out has shape [1]; it must be" in calls.refusal(
        "StridedSlice", x.npu(), begin, end, strides, *masks, small
    )
    assert "strides is [-1]; above 0 is emulated" in calls.refusal(
        "StridedSlice", x.npu(), [0], [2], [-1], *[0] * 5, small
    )


def test_transposition_and_shape_in_one():
    calls, x = Calls(), numbers(2, 3, 4, 6)
    first, second = (
        torch.zeros(shape, dtype=torch.int32).npu() for shape in ((2, 4, 18), (2, 6, 12))
    )
    calls.compute("ConfusionTranspose", x.npu(), [0, 2, 1, 3], [2, 4, 18], True, first)
    calls.compute("ConfusionTranspose", x.npu(), [0, 2, 1], [2, 12, 6], False, second)
    assert torch.equal(first.cpu(), x.permute(0, 2, 1, 3).reshape(2, 4, 18))
    assert torch.equal(second.cpu(), x.reshape(2, 12, 6).permute(0, 2, 1))
    message = calls.refusal("ConfusionTranspose", x.npu(), [0, 2, 2], [2, 12, 6], False, second)
    assert message == "perm is [0, 2, 2]; it must be a permutation of 3 dimensions"
