# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Functions that read or write at indices."""

import sys

import pytest
import torch
import torch_npu
from cann_calls import Calls
from torch.nn import functional as F

ALL = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool]
INDEX = [torch.int64, torch.int32]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def tensor(dtype, *shape):
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape or (6, 7, 8)).to(dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("kind", INDEX, ids=str)
def test_read(agree, kind, dtype):
    x = tensor(dtype)
    for view in (x, x.permute(1, 0, 2), x[::2]):
        some = torch.randint(0, view.size(0), (5,)).to(kind)
        grid = torch.randint(0, view.size(0), (2, 3)).to(kind)
        last = torch.randint(0, 8, (2, 3)).to(kind)
        agree(lambda x, i: x[i], view, some)
        agree(lambda x, i: x[i], view, grid)
        agree(lambda x, i: x[:, :, i], view, last)
        agree(lambda x, i, j: x[i, :, j], view, grid, last)
        agree(lambda x, i, j: x[i, 1:3, j], view, grid, last)
        agree(lambda x, i: x[i, None], view, some)
        agree(lambda x, i: x.index_select(0, i), view, some)
        agree(lambda x, i: x.index_select(-1, i), view, last.flatten())
        agree(
            lambda x, i: x.take_along_dim(i, 2),
            view,
            torch.randint(0, 8, (*view.shape[:2], 3)).long(),
        )
    agree(lambda x, i: x[i], x, torch.empty(0, dtype=kind))
    agree(lambda x, i: x[i], x, torch.tensor(2, dtype=kind))
    agree(lambda x, i: x[i], x, torch.tensor([-1, 0], dtype=kind))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_read_by_mask(agree, dtype):
    x = tensor(dtype)
    mask = torch.rand(6, 7) > 0.5
    agree(lambda x, m: x[m], x, mask)
    agree(lambda x, m: x[:, m[0]], x, mask)
    agree(lambda x, m: torch.masked_select(x, m[..., None]), x, mask)
    agree(lambda x, m: torch.masked_select(x, m), x, torch.zeros(6, 7, 8, dtype=torch.bool))
    agree(torch.nonzero, x)
    agree(lambda x: torch.nonzero(x, as_tuple=True), x)
    agree(torch.nonzero, x[:0])
    agree(torch.nonzero, x[0, 0, 0])
    agree(torch.argwhere, x[0])
    agree(lambda x: torch.count_nonzero(x), x)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("kind", INDEX, ids=str)
def test_gather(agree, kind, dtype):
    x = tensor(dtype)
    for dim in (0, 1, -1):
        index = torch.randint(0, x.size(dim), (3, 4, 5)).to(kind)
        agree(lambda x, i: x.gather(dim, i), x, index.long())  # noqa: B023
    scalar = torch.tensor(3, dtype=dtype)
    agree(lambda x, i: x.gather(0, i), scalar, torch.tensor(0))
    agree(lambda x, i: x.gather(0, i), scalar, torch.tensor([0, 0]))
    agree(lambda x, i: x.gather(0, i), x[0, 0], torch.tensor(2))


@pytest.mark.parametrize("kind", INDEX, ids=str)
def test_gather_takes_int32_indices(kind):
    x, index = tensor(torch.float32), torch.randint(0, 8, (6, 7, 3))
    assert torch.equal(x.npu().gather(2, index.to(kind).npu()).cpu(), x.gather(2, index))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("kind", INDEX, ids=str)
def test_write(agree, kind, dtype):
    x, rows = tensor(dtype), tensor(dtype, 3, 7, 8)
    where, column = torch.tensor([4, 0, 2]).to(kind), torch.tensor([1, 7, 3]).to(kind)
    for view in (x, x.permute(0, 2, 1).contiguous().permute(0, 2, 1)):
        agree(lambda x, i, v: x.index_put_((i,), v), view, where, rows)
        agree(lambda x, i, j, v: x.index_put_((i, j), v), view, where, column % 7, rows[:, 0])
        agree(lambda x, i, v: torch.index_put(x, (i,), v), view, where, rows)
        agree(lambda x, i, v: x.index_copy_(0, i, v), view, where.long(), rows)
        agree(lambda x, i, v: torch.index_copy(x, 0, i, v), view, where.long(), rows)
    agree(lambda x, i: x.index_fill_(1, i, 1), x, where.long())
    agree(lambda x, i: torch.index_fill(x, 1, i, 1), x, where.long())
    agree(lambda x, m, v: x.index_put_((m,), v), x, torch.rand(6, 7) > 0.5, tensor(dtype, 8))

    def assign(x, i, v):
        x[:, i] = v[:, :3].transpose(0, 1).repeat(2, 1, 1)[:6, :3]
        x[i[0]] = 1
        return x

    agree(assign, x, where, tensor(dtype, 3, 7, 8))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64], ids=str
)
def test_accumulate(agree, dtype):
    x, rows = torch.ones(6, 8, dtype=dtype), torch.ones(5, 8, dtype=dtype) * 2
    where = torch.tensor([4, 0, 4, 2, 0])
    agree(lambda x, i, v: x.index_put_((i,), v, accumulate=True), x, where, rows)
    agree(lambda x, i, v: x.index_add(0, i, v, alpha=3), x, where, rows)
    agree(lambda x, i, v: x.index_add_(0, i, v), x, where, rows)
    full = where[:, None].expand(5, 8).contiguous()
    agree(lambda x, i, v: x.scatter_add_(0, i, v), x, full, rows)
    agree(lambda x, i, v: x.scatter_add(0, i, v), x, full, rows)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_scatter(agree, dtype):
    x, source = tensor(dtype, 6, 8), tensor(dtype, 6, 8)
    index = torch.stack([torch.randperm(8)[:4] for _ in range(6)])
    agree(lambda x, i, v: x.scatter_(1, i, v), x, index, source)
    agree(lambda x, i, v: x.scatter(1, i, v), x, index, source)
    agree(lambda x, i: x.scatter_(1, i, 1), x, index)
    agree(lambda x, i: x.scatter(1, i, 1), x, index)
    agree(lambda x, i: torch.scatter(x, 0, i, 1), x, index % 6)
    if dtype.is_floating_point:
        agree(lambda x, i, v: x.scatter_(1, i, v, reduce="add"), x, index, source)
        agree(lambda x, i: x.scatter(1, i, 2, reduce="multiply"), x, index)


def test_npu_scatter_nd_update():
    x, rows = torch.randn(24, 12), torch.randn(3, 12)
    where = torch.tensor([[4], [0], [20]])
    expected = x.index_copy(0, where[:, 0], rows)
    assert torch.equal(
        torch_npu.npu_scatter_nd_update(x.npu(), where.npu(), rows.npu()).cpu(), expected
    )
    ours = x.npu()
    torch_npu.npu_scatter_nd_update_(ours, where.int().npu(), rows.npu())
    assert torch.equal(ours.cpu(), expected)
    cell = torch.tensor([[4, 1], [0, 5]])
    expected = x.index_put((cell[:, 0], cell[:, 1]), rows[0, :2])
    assert torch.equal(
        torch_npu.npu_scatter_nd_update(x.npu(), cell.npu(), rows[0, :2].npu()).cpu(), expected
    )


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_masks(agree, dtype):
    x, mask = tensor(dtype), torch.rand(6, 7, 8) > 0.5
    agree(lambda x, m: x.masked_fill(m, 1), x, mask)
    agree(lambda x, m: x.masked_fill_(m, 1), x.transpose(0, 2), mask.transpose(0, 2))
    agree(lambda x, m: x.masked_fill_(m[:, :1], 0), x, mask)
    agree(lambda x, m, v: x.masked_fill(m, v), x, mask, torch.tensor(1, dtype=dtype))
    agree(lambda x, m, v: x.masked_scatter_(m, v), x, mask, tensor(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", INDEX, ids=str)
def test_embedding(agree, kind, dtype):
    weight = torch.randn(11, 8, dtype=dtype)
    for index in (
        torch.randint(0, 11, (3, 4)),
        torch.randint(0, 11, (5,)),
        torch.tensor(3),
        torch.empty(0, dtype=torch.int64),
    ):
        agree(F.embedding, index.to(kind), weight)


def test_rows_by_an_index_of_several_dimensions():
    x, index = torch.randn(9, 4), torch.randint(0, 9, (2, 3))
    assert torch.equal(torch_npu.npu_gather_sparse_index(x.npu(), index.npu()).cpu(), x[index])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_scatter_update(index_dtype):
    """Each entry's updates start at its own place along the axis."""
    data, updates, places = (
        torch.randn(3, 2, 6, 4),
        torch.randn(3, 2, 2, 4),
        torch.tensor([4, 0, 1], dtype=index_dtype),
    )
    expected = data.clone()
    for entry, place in enumerate(places.tolist()):
        expected[entry, :, place : place + 2] = updates[entry]
    ours = data.npu()
    assert torch.equal(
        torch_npu.scatter_update(ours, places.npu(), updates.npu(), -2).cpu(), expected
    )
    assert torch.equal(ours.cpu(), data)
    torch_npu.scatter_update_(ours, places.npu(), updates.npu(), -2)
    assert torch.equal(ours.cpu(), expected)


WHERE = torch.tensor([[0, 2, 1], [3, 0, 0]])
CASES = {
    "take": lambda x: x.take(WHERE.to(x.device)),
    "put": lambda x: x.put_(torch.tensor([1, 5, 7], device=x.device), x[0, :3].clone()),
    "put, accumulated": lambda x: x.put_(
        torch.tensor([1, 5, 1], device=x.device), x[0, :3].clone(), accumulate=True
    ),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0, 2], device=x.device), 1.5),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(agree, name, dtype):
    if dtype == torch.bfloat16 and name.startswith("put"):
        pytest.skip("A3 refuses it (test_strictness.py)")
    agree(CASES[name], ((torch.randperm(24).view(4, 6) - 12) / 4).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", ["sum", "prod", "amax", "amin", "mean"])
@pytest.mark.parametrize("include_self", [True, False])
def test_scatter_reduce(agree, reduction, include_self, dtype):
    x, source = torch.randn(4, 6).to(dtype), torch.randn(2, 3).to(dtype)
    arguments = {"reduce": reduction, "include_self": include_self}
    agree(lambda x, s: x.scatter_reduce(0, WHERE.to(x.device), s, **arguments), x, source)
    agree(lambda x, s: x.scatter_reduce_(0, WHERE.to(x.device), s, **arguments), x, source)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(agree, mode):
    def bags(table):
        indices, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 3, 4])
        return F.embedding_bag(indices.to(table.device), table, offsets.to(table.device), mode=mode)

    agree(bags, torch.randn(7, 3))


def test_embedding_is_renormed(agree):
    agree(
        lambda t: F.embedding(torch.tensor([1, 4], device=t.device), t * 3, max_norm=1.0),
        torch.randn(7, 3),
    )


def test_forms_of_the_npu(agree):
    def split(x):
        out = [torch.empty(4, width, device=x.device, dtype=x.dtype) for width in (1, 2, 3)]
        torch.split_with_sizes_copy(x, [1, 2, 3], 1, out=out)
        return out

    def added(x, source):
        places = torch.tensor([3, 0, 3], device=x.device)
        return (
            torch.ops.npu._npu_index_add(x, places, source)
            if x.is_npu
            else x.index_add(0, places, source)
        )

    agree(split, torch.randn(4, 6))
    agree(added, torch.randn(4, 6), torch.randn(3, 6))


@pytest.mark.parametrize("axis", [-2, -1])
def test_rows_of_several_tensors(axis):
    tensors, places = (
        [torch.randn(2, 6, 4) for _ in range(3)],
        torch.tensor([0, 3, 1], dtype=torch.int32),
    )
    updates, mask = (
        torch.randn(3, 2, *((1, 4) if axis == -2 else (6, 1))),
        torch.ones(3, dtype=torch.uint8),
    )
    ours = [each.npu() for each in tensors]
    copies = torch_npu.npu_scatter_list(
        ours, places.npu(), updates.npu(), mask.npu(), "update", axis
    )
    torch_npu.npu_scatter_list_(ours, places.npu(), updates.npu(), None, "update", axis)
    for i, (first, second, expected) in enumerate(zip(copies, ours, tensors, strict=True)):
        expected.narrow(axis, int(places[i]), 1).copy_(updates[i])
        assert torch.equal(first.cpu(), expected)
        assert torch.equal(second.cpu(), expected)
    with pytest.raises(RuntimeError, match="reduce is add; allowed: update"):
        torch_npu.npu_scatter_list_(ours, places.npu(), updates.npu(), None, "add", axis)


def test_sparse_tensors_are_coalesced():
    places = torch.tensor([[2, 0, 2, 2], [1, 3, 1, 0]])
    for values in (torch.randn(4), torch.randn(4, 2).half()):
        ours = torch.sparse_coo_tensor(
            places.npu(), values.npu(), (3, 4, *values.shape[1:])
        ).coalesce()
        expected = torch.sparse_coo_tensor(
            places, values.float(), (3, 4, *values.shape[1:])
        ).coalesce()
        assert torch.equal(ours.indices().cpu(), expected.indices())
        torch.testing.assert_close(
            ours.values().cpu().float(), expected.values(), rtol=2e-3, atol=1e-3
        )
    index, given = (
        torch.zeros(3, dtype=torch.int32).npu(),
        torch.zeros(4, 2, dtype=torch.int32).npu(),
    )
    message = Calls().refusal(
        "CoalesceSparse", index, index, given, torch.ones(4).npu(), given, torch.ones(3).npu()
    )
    assert message == "unique_indices has shape [3]; it must be [4]"


MASKED = """
import torch, torch_npu
torch_npu.npu.set_compile_mode(jit_compile=False)
x = torch.zeros(9, 4, dtype=torch.{dtype}, device="npu")
mask = torch.arange(9, device="{device}") > 6
x[mask] = torch.ones(2, 4, dtype=x.dtype, device="npu")
print("launched", flush=True)
torch.npu.synchronize()
print(x.sum().item())
"""


@pytest.mark.parametrize("device", ["npu", "cpu"])
def test_assignment_by_mask_on_ascend_310p(run, device):
    program = MASKED.format(dtype="float16", device=device)
    done = run("run", "--soc", "Ascend310P3", "--", sys.executable, "-c", program)
    assert done.stdout == "launched\n"
    assert "error code is 507018" in done.stderr
    assert "(rule index_put.ai-cpu, seen on hardware: vllm-ascend, issues 12086 and" in done.stderr
    for soc, dtype in (("Ascend310P3", "float32"), ("Ascend910B1", "float16")):
        program = MASKED.format(dtype=dtype, device=device)
        done = run("run", "--soc", soc, "--", sys.executable, "-c", program)
        assert done.stdout == "launched\n8.0\n", done.stderr
