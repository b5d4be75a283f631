"""All2all backends: results on two NPUs, and their selection."""

from typing import Any

import pytest
import torch
from ascend_communicator import OPTIONS, _take_options
from ascend_communicator.moe.mc2 import unsupported_reason
from ascend_communicator.moe.select import select_backend
from ascend_platform import extension

FACTORS = torch.tensor([0.5, -1.0, 2.0, -0.5]).double()
NAMES = {"uneven": ([3, 5], 4), "one rank": ([3, 5], 2), "large": ([300, 2], 4)}
TAKEN = {
    ("uneven", "auto", "bfloat16"): "mc2",
    ("one rank", "auto", "bfloat16"): "mc2",
    ("uneven", "mc2", "bfloat16"): "mc2",
    ("one rank", "mc2", "bfloat16"): "mc2",
    ("large", "mc2", "bfloat16"): "alltoall",
}


def expected(rank: int, tokens: int, to: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(50 + rank)
    ids = torch.stack([torch.randperm(to, generator=draw)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=draw).double()
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(7000 + rank)).to(dtype).double()
    return x * (weights * FACTORS[ids]).sum(1, keepdim=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("asked", ["auto", "allgather", "alltoall", "mc2"])
@pytest.mark.parametrize("name", NAMES)
def test_backends_on_two_npus(played: dict[str, Any], name: str, asked: str, dtype: str) -> None:
    sizes, to = NAMES[name]
    kind = getattr(torch, dtype)
    for rank in range(2):
        *taken, made = played["ways"][rank][f"{name} {asked} {kind}"]
        if (asked, dtype) == ("mc2", "float32"):
            assert made == (
                "ascend.communicator.all2all is mc2, which is not supported here: float32 is not float16 or bfloat16; "
                "set auto or allgather or alltoall"
            )
            continue
        assert taken == [TAKEN.get((name, asked, dtype), "alltoall" if asked == "alltoall" else "allgather")]
        if taken == ["allgather"]:
            assert made is None  # runs as dispatch and combine, which test_communicator.py compares
            continue
        bound = 1e-5 if dtype == "float32" else 0.03
        exact = expected(rank, sizes[rank], to, kind)
        torch.testing.assert_close(torch.tensor(made, dtype=torch.float64), exact, rtol=bound, atol=bound)


A2, A3, DUO = (extension.Chip(name, 0, 0, 0) for name in ("Ascend910B1", "Ascend910_9392", "Ascend310P3"))
HALF, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("chip", "sizes", "experts", "choices", "hidden", "dtype", "taken"),
    [
        (A2, [64] * 8, 64, 8, 4096, HALF, "mc2"),
        (A2, [1, 256], 64, 8, 4096, HALF, "mc2"),
        (A2, [1, 257], 64, 8, 4096, HALF, "allgather"),  # more tokens than mc2 supports; 8 copies against 2
        (A2, [300] * 16, 64, 8, 4096, HALF, "alltoall"),  # 8 copies against 16
        (A2, [300] * 8, 64, 8, 4096, HALF, "allgather"),  # equal traffic, and no synchronization
        (A2, [0, 4], 64, 1, 4096, HALF, "alltoall"),  # a rank without tokens
        (A2, [4] * 12, 60, 8, 4096, HALF, "alltoall"),  # unsupported number of ranks on this chip
        (A3, [4] * 12, 60, 8, 4096, HALF, "mc2"),
        (A3, [512] * 4, 64, 8, 4096, HALF, "mc2"),
        (A3, [4] * 4, 64, 8, 512, HALF, "allgather"),
        (A2, [4] * 4, 64, 8, 512 + 16, HALF, "allgather"),
        (A2, [4] * 4, 64, 17, 4096, HALF, "allgather"),
        (A2, [4] * 4, 66, 2, 4096, HALF, "allgather"),  # experts not divisible by ranks
        (A2, [4] * 4, 64, 2, 4096, WIDE, "alltoall"),
        (DUO, [4] * 4, 64, 2, 4096, torch.float16, "allgather"),
    ],
)
def test_select_backend(
    chip: extension.Chip, sizes: list[int], experts: int, choices: int, hidden: int, dtype: torch.dtype, taken: str
) -> None:
    assert select_backend("auto", chip, sizes, experts, choices, hidden, dtype) == taken
    assert select_backend("allgather", chip, sizes, experts, choices, hidden, dtype) == "allgather"
    assert select_backend("alltoall", chip, sizes, experts, choices, hidden, dtype) == "alltoall"
    if taken == "mc2":
        assert select_backend("mc2", chip, sizes, experts, choices, hidden, dtype) == "mc2"
    elif unsupported_reason(chip, len(sizes), experts, choices, hidden, dtype):
        with pytest.raises(ValueError, match="is mc2, which is not supported here: "):
            select_backend("mc2", chip, sizes, experts, choices, hidden, dtype)
    else:
        assert select_backend("mc2", chip, sizes, experts, choices, hidden, dtype) == "alltoall"


def test_unknown_backend_is_refused() -> None:
    _take_options(OPTIONS | {"all2all": "mc2"})
    with pytest.raises(extension.RefusedError, match=r"all2all is 'nccl'; supported: auto, allgather, alltoall, mc2"):
        _take_options(OPTIONS | {"all2all": "nccl"})
