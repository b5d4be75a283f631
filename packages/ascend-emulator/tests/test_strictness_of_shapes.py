# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Shapes of plain operators are refused at the call, and legitimate forms are taken."""

import re

import pytest
import torch
from cann_calls import Calls
from torch.nn import functional


def npu(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype).npu()


@pytest.fixture(autouse=True)
def no_failed_stream():
    """No stream has failed after any of these tests."""
    yield
    torch.npu.synchronize()
    assert npu(3).sum().item() == 3


def made_of(value):
    """A tensor for a shape, a list of them for a list of shapes."""
    if isinstance(value, list):
        return [made_of(each) for each in value]
    return npu(*value) if isinstance(value, tuple) else value


M, V, OUT = (4, 6), (3,), (4, 6)


ONE = 1.0


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("Silu", (M, (4, 5)), "out has shape [4, 5]; it must be [4, 6]"),
        ("Abs", (M, ()), "out has shape []; it must be [4, 6]"),
        (
            "Add",
            (M, V, ONE, OUT),
            "other has shape [3], which does not broadcast with self's [4, 6]",
        ),
        ("Mul", (M, (1, 6), (1, 6)), "out has shape [1, 6]; it must be [4, 6]"),
        (
            "InplaceMul",
            ((1, 6), M),
            "other has shape [4, 6], which does not expand to self's [1, 6]",
        ),
        (
            "Addcmul",
            (M, (6,), V, ONE, OUT),
            "b has shape [3], which does not broadcast with self and the others' [4, 6]",
        ),
        ("EqTensor", (M, (4, 1), (4, 1)), "out has shape [4, 1]; it must be [4, 6]"),
        (
            "Mm",
            (M, (5, 2), (4, 2), 0),
            "other has shape [5, 2], where 5 must be 6, the last size of self's [4, 6]",
        ),
        ("Mm", (M, (6, 2), (4, 3), 0), "out has shape [4, 3]; it must be [4, 2]"),
        ("Mm", ((2, 4, 6), (6, 2), (4, 3), 0), "self has 3 dimensions; allowed: 2"),
        (
            "BatchMatMul",
            ((2, 64, 96), (2, 95, 64), (2, 64, 64), 0),
            "other has shape [2, 95, 64], where 95 must be 96, the last size of self's [2, 64, 96]",
        ),
        (
            "BatchMatMul",
            ((2, 64, 96), (2, 96, 64), (2, 64, 63), 0),
            "out has shape [2, 64, 63]; it must be [2, 64, 64]",
        ),
        ("BatchMatMul", (M, (6, 2), (4, 2), 0), "self has 2 dimensions; allowed: 3"),
        ("SwiGlu", ((64, 129), -1, (64, 64)), "dimension 1 of x has size 129; it must be even"),
        ("SwiGlu", ((65, 128), 0, (32, 128)), "dimension 0 of x has size 65; it must be even"),
        ("SwiGlu", ((64, 128), -1, (64, 128)), "out has shape [64, 128]; it must be [64, 64]"),
        (
            "Matmul",
            ((3, 4, 6), (2, 6, 5), (3, 4, 5), 0),
            (
                "other has shape [2, 6, 5], whose first dimensions do not broadcast with those of"
                " self's [3, 4, 6]"
            ),
        ),
        (
            "Addmm",
            (V, M, (6, 2), ONE, ONE, (4, 2), 0),
            "self has shape [3], which does not expand to out's [4, 2]",
        ),
        ("Softmax", (M, 2, OUT), "dim is 2; allowed: -2 to 1"),
        ("Cumsum", (M, -3, 0, OUT), "dim is -3; allowed: -2 to 1"),
        (
            "ReduceSum",
            (M, [0, -2], False, 0, (6,)),
            "dim is [0, -2], which has dimension 0 more than once",
        ),
        ("Mean", (M, [1], True, 0, (4,)), "out has shape [4]; it must be [4, 1]"),
        ("Amax", (M, [5], False, (4,)), "dim is 5; allowed: -2 to 1"),
        (
            "Cat",
            ([M, (5, 6), V], 0, (9, 6)),
            "tensors has shapes [4, 6] and [3]; allowed: a difference only in dimension 0",
        ),
        ("Cat", ([M, (5, 6)], 0, (8, 6)), "out has shape [8, 6]; it must be [9, 6]"),
        ("Stack", ([M, V], 0, OUT), "tensors has shapes [4, 6] and [3]; they must be the same"),
        (
            "Repeat",
            (M, [2], OUT),
            "repeats has 1 numbers; allowed: at least 2, the dimensions of self",
        ),
        ("ConstantPadNd", (M, [1, 2], ONE, OUT), "out has shape [4, 6]; it must be [4, 9]"),
        ("InplaceCopy", (M, V), "source has shape [3], which does not expand to self's [4, 6]"),
        ("Embedding", (M, V, (3, 6)), "indices is Float (DT_FLOAT); allowed: Int, Long"),
        ("IndexSelect", (M, 2, V, (3, 6)), "index is Float (DT_FLOAT); allowed: Int, Long"),
        (
            "Gather",
            (M, 1, V, V),
            "index has shape [3]; allowed: sizes up to [4, 6], except in dimension 1",
        ),
        ("TopkV2", (M, 7, 1, True, True, 1, OUT, OUT), "k is 7; allowed: 0 to 6"),
        ("Sort", (M, False, 1, False, (4, 5), OUT), "values has shape [4, 5]; it must be [4, 6]"),
        ("Eye", (2, 3, (3, 2)), "out has shape [3, 2]; it must be [2, 3]"),
    ],
)
def test_shape_is_refused_at_the_call(name, arguments, named):
    tensors = [made_of(each) for each in arguments]
    torch.npu.synchronize()
    status, _, message = Calls().workspace(name, *tensors)
    assert status != 0
    assert message == f"[ascend-emulator] aclnn{name}: {named} (CANN refuses, inferred)"


def test_output_of_the_wrong_shape_is_refused_not_resized():
    x, y = torch.randn(6, device="npu"), torch.zeros(8, device="npu")
    torch.npu.synchronize()
    calls = Calls()
    assert calls.run("Silu", x, calls.tensor(y, (6,))) == (0, "")
    torch.testing.assert_close(y[:6], functional.silu(x))
    before = y.cpu()
    for shape in ((5,), (2, 3), (8,), (0,)):
        status, message = calls.run("Silu", x, calls.tensor(y, shape))
        assert status != 0
        assert message.startswith(
            f"[ascend-emulator] aclnnSilu: out has shape {list(shape)}; it must be [6] ("
        )
        assert torch.equal(y.cpu(), before)


def test_missing_arguments_and_host_memory_are_refused():
    x, host = torch.randn(6, device="npu"), torch.randn(6)
    calls = Calls()
    assert "a required argument is null" in calls.run("Silu", x, None)[1]
    assert "not device memory" in calls.run("Silu", x, host)[1]
    assert "not device memory" in calls.run("Add", host, x, ONE, x)[1]


@pytest.mark.parametrize(
    ("shape", "dtype", "updates", "named"),
    [
        ((3, 1), torch.float32, (3, 64), "indices is Float (DT_FLOAT); allowed: "),
        ((3, 4), torch.int64, (3,), "the last dimension of indices is 4; allowed: 1 to 2"),
        ((3, 1), torch.int64, (2, 64), "updates has shape [2, 64]; it must be [3, 64]"),
    ],
)
def test_indices_of_scatter_nd_update(shape, dtype, updates, named):
    indices = torch.zeros(shape, dtype=dtype, device="npu")
    assert named in Calls().run("ScatterNdUpdate", npu(128, 64), indices, npu(*updates))[1]


@pytest.mark.parametrize("shape", [(64, 128), (2, 4)])
def test_swiglu_of_integers_is_refused_at_the_call(shape):
    x = torch.ones(*shape, dtype=torch.int32, device="npu").t().contiguous()
    out = torch.ones(shape[1] // 2, shape[0], dtype=torch.int32, device="npu")
    assert "x is Int (DT_INT32); allowed: " in Calls().run("SwiGlu", x, 0, out)[1]


@pytest.mark.parametrize("rows", [4, 128])
def test_layer_norm_of_mixed_dtypes_is_refused_at_the_call(rows):
    x, half, single = npu(rows, 64), npu(64, dtype=torch.float16), npu(64)
    for weight, bias, named in (
        (half, half, "weight is Half (DT_FLOAT16); allowed: Float"),
        (single, half, "bias is Half (DT_FLOAT16); allowed: Float"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(named)):
            functional.layer_norm(x, (64,), weight, bias)
    with pytest.raises(RuntimeError, match=r"bias is Float \(DT_FLOAT\) and weight is Half"):
        functional.layer_norm(x.half(), (64,), half, single)
    functional.layer_norm(x.half(), (64,), single, single)


WIDE, NARROW = (128, 4096), (128, 4095)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("MseLoss", (WIDE, NARROW, 0, WIDE)),
        ("MseLoss", (WIDE, WIDE, 0, NARROW)),
        ("SmoothL1Loss", (WIDE, NARROW, 0, ONE, WIDE)),
        ("SiluBackward", (WIDE, NARROW, WIDE)),
        ("TanhBackward", (WIDE, NARROW, WIDE)),
        ("GeluBackward", (WIDE, NARROW, WIDE)),
    ],
)
def test_large_sizes_that_differ_by_one_are_refused_at_the_call(name, arguments):
    status, _, message = Calls().workspace(name, *map(made_of, arguments))
    assert status == 161002
    assert re.search(r"4095\b.*4096|4096\b.*4095", message)


@pytest.mark.parametrize("shape", [(2, 64, 5), (128, 64, 512)])
def test_group_norm_of_mixed_dtypes_is_refused_at_the_call(shape):
    x, half, single = npu(*shape), npu(64, dtype=torch.float16), npu(64)
    for given, weight, bias in ((x, half, half), (x, single, half), (x.half(), single, single)):
        with pytest.raises(RuntimeError, match=r"rule group_norm\.dtypes"):
            functional.group_norm(given, 8, weight, bias)
    functional.group_norm(x.half(), 8, half, half)


def test_layer_norm_of_another_size_is_refused_at_the_call():
    x, weight = npu(32, 4096), npu(4096)
    rest = (1e-5, npu(32, 4096), npu(32, 1), npu(32, 1))
    assert Calls().workspace("LayerNorm", x, [4096], weight, weight, *rest)[0] == 0
    # No size of a tensor equals the second one's attribute.
    for shape, parameters in (([4096], npu(4095)), ([4095], None)):
        status, _, message = Calls().workspace("LayerNorm", x, shape, parameters, parameters, *rest)
        assert (status, "[4095]" in message) == (161002, True)


def test_legitimate_forms_are_taken(agree):
    """Calls that the rules of shapes must not refuse."""
    x, empty = torch.randn(4, 6), torch.zeros(0)
    agree(lambda a: a + 1, torch.randn(()))
    agree(lambda a, b: a * b, torch.randn(4, 1, 6), torch.randn(5, 1))
    agree(lambda a, b: torch.cat([a, b]), x, empty)
    agree(lambda a, b: a @ b, torch.randn(3), torch.randn(3))
    agree(lambda a, b: a @ b, torch.randn(2, 3, 4), torch.randn(4))
    agree(lambda a, b: a @ b, torch.randn(4), torch.randn(4, 3))
    agree(lambda a: a.sum(), x)
    agree(torch.ceil, torch.arange(3))
    agree(lambda a: a.sum((0, 1), keepdim=True), x)
    agree(lambda a: a.argmax(), x)
    agree(lambda a: torch.softmax(a, 0), torch.randn(()))
    agree(lambda a: a.repeat(2, 1, 3), x)
    agree(lambda a, i: a.gather(1, i), x, torch.zeros(2, 9, dtype=torch.int64))
    agree(lambda a, i: a.index_select(0, i), x, torch.tensor([3, 0, 3]))
    agree(lambda a: torch.nn.functional.pad(a, (-1, 2)), x)
    agree(lambda a, m: a.masked_fill(m, 2.0), x, torch.rand(6) > 0.5)


def test_undocumented_forms_that_hardware_accepts_are_accepted(agree):
    """By PyTorch's own tests on Atlas A3."""
    for dtype in (torch.complex64, torch.complex128):
        x, y = torch.randn(4, dtype=dtype), torch.randn(4, dtype=dtype)
        agree(lambda a, b: a + b, x, y)
        agree(lambda a: a + 1, x)
        agree(lambda a, b: a**b, x, y, ulps=64)
        agree(lambda a: a**2, x, ulps=64)
        agree(lambda a, b: torch.stack([a, b]), x, y)
        agree(torch.sinh, x)
        agree(lambda a, i, b: a.scatter_add(0, i, b), x, torch.tensor([0, 2]), y)
    agree(torch.abs, torch.randn(4, dtype=torch.complex64))
    agree(lambda a: 1.5 + a, torch.randn(4))
    agree(lambda a: torch.add(torch.tensor(2.5), a, alpha=3), torch.randn(4))
    agree(lambda a: torch.log_softmax(a, 0), torch.randn(4, dtype=torch.float64))
    agree(lambda a: torch.log_softmax(a, 0, dtype=torch.float64), torch.randn(4))
    agree(torch.sinh, torch.arange(3))
    agree(torch.sinh, torch.tensor([True, False]))
    agree(torch.square, torch.tensor([True, False]))
    agree(
        lambda a, i, b: a.put_(i, b),
        torch.zeros(4, dtype=torch.bool),
        torch.tensor([1]),
        torch.tensor([True]),
    )
    agree(lambda a: functional.layer_norm(a, (3,)), torch.zeros(0, 3))
    agree(lambda a: functional.layer_norm(a, (2, 3)), torch.zeros(0, 2, 3))
    agree(lambda a: torch.all(a, dim=()), torch.tensor([True, False]))
    empty, offsets = torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    agree(
        lambda a, i, o: functional.embedding_bag(i, a, o, mode="sum"),
        torch.randn(4, 3),
        empty,
        offsets,
    )
    samples = torch.zeros(0)
    call = functional.embedding_bag
    agree(
        lambda a, i, o, w: call(i, a, o, mode="sum", per_sample_weights=w),
        torch.randn(4, 3),
        empty,
        offsets,
        samples,
    )
