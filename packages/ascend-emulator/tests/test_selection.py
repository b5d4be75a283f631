"""Functions that look up, order, scatter or split."""

import pytest
import torch
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
WHERE = torch.tensor([[0, 2, 1], [3, 0, 0]])
CASES = {
    "kthvalue": lambda x: tuple(x.kthvalue(3)),
    "median": lambda x: tuple(x.median(0)),
    "nanmedian": lambda x: torch.where(x > 0, x, torch.nan).nanmedian(),
    "nanmedian over a dim": lambda x: tuple(torch.where(x > -3, x, torch.nan).nanmedian(1)),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0, 2], device=x.device).to(x.dtype), right=True),
    "take": lambda x: x.take(WHERE.to(x.device)),
    "put": lambda x: x.put_(torch.tensor([1, 5, 7], device=x.device), x[0, :3].clone()),
    "put, accumulated": lambda x: x.put_(torch.tensor([1, 5, 1], device=x.device), x[0, :3].clone(), accumulate=True),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0, 2], device=x.device), 1.5),
    "isin a number": lambda x: torch.isin(x, 0.25),
    "a number isin": lambda x: torch.isin(0.25, x),
    "channel_shuffle": lambda x: torch.channel_shuffle(x.view(1, 4, 6, 1), 2),
    "split into copies": lambda x: tuple(torch.split_with_sizes_copy(x, [1, 2, 3], 1)),
    "chunk_cat": lambda x: torch._chunk_cat([x, x[:3]], 0, 2),
    "gcd": lambda x: torch.gcd((x * 8).int(), torch.tensor(12, dtype=torch.int32, device=x.device)),
    "unique": lambda x: torch.ops.aten._unique(x.round(), True, True),
    "unique rows": lambda x: torch.unique(x[:, :1].round(), dim=0, return_inverse=True, return_counts=True),
    "unique neighbours": lambda x: torch.unique_consecutive((x > 0).to(x.dtype), return_inverse=True, return_counts=True),
    "unique neighbouring rows": lambda x: torch.unique_consecutive((x[:, :1] > 0).to(x.dtype), dim=0),
    "repeat_interleave of counts": lambda x: torch.repeat_interleave(torch.tensor([2, 0, 3], device=x.device)),
    "aminmax": lambda x: tuple(torch._aminmax(x)),
    "aminmax of a dim": lambda x: tuple(torch._aminmax(x, 1)),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(agree, name, dtype):
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
    agree(lambda t: F.embedding(torch.tensor([1, 4], device=t.device), t * 3, max_norm=1.0), torch.randn(7, 3))


def test_forms_of_the_npu(agree):
    def split(x):
        out = [torch.empty(4, width, device=x.device, dtype=x.dtype) for width in (1, 2, 3)]
        torch.split_with_sizes_copy(x, [1, 2, 3], 1, out=out)
        return out

    def added(x, source):
        places = torch.tensor([3, 0, 3], device=x.device)
        return torch.ops.npu._npu_index_add(x, places, source) if x.is_npu else x.index_add(0, places, source)

    agree(split, torch.randn(4, 6))
    agree(added, torch.randn(4, 6), torch.randn(3, 6))
