# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""All2all backends: results on two NPUs, and their selection."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_communicator import Options
from ascend_communicator.moe import MoEShape
from ascend_communicator.moe.alltoall import regroup
from ascend_communicator.moe.mc2 import algorithm, buffer_mib, token_limit, unsupported_reason
from ascend_communicator.moe.select import select_backend
from ascend_platform import extension
from harness.engines import npus

FACTORS = torch.tensor([0.5, -1.0, 2.0, -0.5]).double()
NAMES = {"uneven": ([3, 5], 4), "one rank": ([3, 5], 2), "large": ([300, 2], 4)}
SELECTED = {
    ("uneven", "mc2", "bfloat16"): "mc2",
    ("one rank", "mc2", "bfloat16"): "mc2",
    ("large", "mc2", "bfloat16"): "alltoall",
}


def expected(rank: int, tokens: int, to: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(50 + rank)
    ids = torch.stack([torch.randperm(to, generator=draw)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=draw).double()
    x = (
        torch.randn(tokens, 64, generator=torch.Generator().manual_seed(7000 + rank))
        .to(dtype)
        .double()
    )
    return x * (weights * FACTORS[ids]).sum(1, keepdim=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("asked", ["auto", "allgather", "alltoall", "mc2"])
@pytest.mark.parametrize("name", NAMES)
def test_backends_on_two_npus(scenarios: dict[str, Any], name: str, asked: str, dtype: str) -> None:
    sizes, to = NAMES[name]
    kind = getattr(torch, dtype)
    for rank in range(2):
        *path, actual = scenarios["ways"][rank][f"{name} {asked} {kind}"]
        if (asked, dtype) == ("mc2", "float32"):
            assert (
                actual
                == "ascend.communicator.all2all is mc2, which is not supported here: float32 is not"
                " float16 or bfloat16; fix: set auto or allgather or alltoall"
            )
            continue
        assert path == [
            SELECTED.get((name, asked, dtype), "alltoall" if asked == "alltoall" else "allgather")
        ]
        if path == ["allgather"]:
            # Runs as dispatch and combine, which test_communicator.py compares.
            assert actual is None
            continue
        bound = 1e-5 if dtype == "float32" else 0.03
        exact = expected(rank, sizes[rank], to, kind)
        torch.testing.assert_close(
            torch.tensor(actual, dtype=torch.float64), exact, rtol=bound, atol=bound
        )


def close(actual: Any, rank: int, tokens: int, bound: float = 0.03) -> None:
    exact = expected(rank, tokens, 4, torch.bfloat16)
    torch.testing.assert_close(
        torch.tensor(actual, dtype=torch.float64), exact, rtol=bound, atol=bound
    )


def test_mc2_and_alltoall_alternate(scenarios: dict[str, Any]) -> None:
    """The emulator refuses mc2 on a communicator with other operators, and other operators on that
    of mc2."""
    for rank in range(2):
        used, *steps = scenarios["alternating"][rank]
        assert used == ["alltoall", "mc2"]
        for result, sizes in zip(steps, ([3, 5], [300, 2], [3, 5], [2, 300], [3, 5]), strict=True):
            close(result, rank, sizes[rank])


def test_mc2_on_atlas_a3() -> None:
    """Dispatch and combine take different names of algorithms there."""
    script = str(Path(__file__).with_name("ranks_of_a3.py"))
    done = npus.run(2, sys.executable, script, VLLM_PLUGINS="", ASCEND_EMULATOR_SOC="Ascend910_93")
    assert npus.by_name(done)["mc2"]["errors"] == pytest.approx([0, 0], abs=0.03)


@pytest.mark.parametrize("backend", ["alltoall", "mc2"])
def test_int8_tokens(scenarios: dict[str, Any], backend: str) -> None:
    for rank in range(2):
        actual, dtypes = scenarios["quantized"][rank][backend]
        assert dtypes == ["torch.int8"]
        close(actual, rank, [3, 5][rank], 0.06)


@pytest.mark.parametrize(
    ("dtype", "hidden"), [("bfloat16", 64), ("float32", 64), ("float16", 16384), ("float32", 24576)]
)
def test_rows_are_sorted_by_expert_and_back(dtype: str, hidden: int) -> None:
    """CANN moves rows of less than 16384 values of 16 bits."""
    counts = torch.tensor([[2, 0, 1], [1, 3, 1]])
    rows = torch.randn(8, hidden).to(getattr(torch, dtype))
    grouped, totals = regroup(rows.npu(), counts.npu())
    assert torch.equal(grouped.cpu(), rows[[0, 1, 3, 4, 5, 6, 2, 7]])
    assert totals.tolist() == [3, 3, 2]
    assert torch.equal(regroup(grouped, counts.t().npu())[0].cpu(), rows)


def test_new_groups_have_a_new_group_of_mc2(scenarios: dict[str, Any]) -> None:
    for rank in range(2):
        assert scenarios["options"][rank]["used"] == ["mc2"]
        close(scenarios["options"][rank]["again"], rank, [3, 5][rank])
        assert scenarios["recreated"][rank] == [2, 2]


A2, A3, DUO = (
    extension.Chip(name, 0, 0, 0) for name in ("Ascend910B1", "Ascend910_9392", "Ascend310P3")
)
HALF, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("chip", "sizes", "experts", "choices", "hidden", "dtype", "selected"),
    [
        (A2, [64] * 8, 64, 8, 4096, HALF, "mc2"),
        (A2, [1, 256], 64, 8, 4096, HALF, "mc2"),
        # More tokens than MC2 supports: 8 copies instead of 2.
        (A2, [1, 257], 64, 8, 4096, HALF, "allgather"),
        (A2, [300] * 16, 64, 8, 4096, HALF, "alltoall"),  # 8 copies against 16
        (A2, [300] * 8, 64, 8, 4096, HALF, "allgather"),  # equal traffic, and no synchronization
        (A2, [0, 4], 64, 1, 4096, HALF, "alltoall"),  # a rank without tokens
        # This number of ranks is unsupported on this chip.
        (A2, [4] * 12, 60, 8, 4096, HALF, "alltoall"),
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
    chip: extension.Chip,
    sizes: list[int],
    experts: int,
    choices: int,
    hidden: int,
    dtype: torch.dtype,
    selected: str,
) -> None:
    shape = MoEShape(len(sizes), experts, choices, hidden, dtype)
    limit = token_limit(chip, shape, False, 4096)

    def select(requested: str) -> str:
        backend, reason = select_backend(requested, chip, sizes, shape, limit)
        assert bool(reason) == (requested in ("auto", "mc2") and backend != "mc2")
        return backend

    assert select("auto") == selected
    assert select("allgather") == "allgather"
    assert select("alltoall") == "alltoall"
    if selected == "mc2":
        assert select("mc2") == "mc2"
    elif unsupported_reason(chip, shape, False):
        with pytest.raises(ValueError, match="is mc2, which is not supported here: "):
            select("mc2")
    else:
        assert select("mc2") == "alltoall"


QWEN_235B, QWEN_30B, DEEPSEEK = (128, 8, 4096), (128, 8, 2048), (256, 8, 7168)


@pytest.mark.parametrize(
    ("chip", "model", "ranks", "internode", "name", "max_tokens", "needed", "tokens"),
    # Computed by hand from the formulas of the documentation; the last column is for a buffer of
    # 200 MiB.
    [
        (A2, QWEN_235B, 16, False, "fullmesh", 256, 516, 98),
        (A2, QWEN_235B, 8, False, "fullmesh", 256, 260, 196),
        (A2, QWEN_235B, 16, True, "hierarchy", 512, 545, 183),
        (A2, QWEN_235B, 128, True, "fullmesh", 256, 516, 98),  # one expert on a rank
        (A3, QWEN_30B, 8, False, "", 512, 612, 167),
        (A3, DEEPSEEK, 16, True, "", 512, 3838, 26),
    ],
)
def test_tokens_that_a_buffer_is_enough_for(
    chip: extension.Chip,
    model: tuple[int, ...],
    ranks: int,
    internode: bool,
    name: str,
    max_tokens: int,
    needed: int,
    tokens: int,
) -> None:
    shape = MoEShape(ranks, *model, HALF)
    limits = algorithm(chip, shape, internode)
    assert (limits.comm_alg, limits.tokens) == (name, max_tokens)
    assert buffer_mib(name, shape, max_tokens) == needed
    limit = token_limit(chip, shape, internode, 200)
    assert limit.tokens == tokens
    assert (
        f"takes up to {tokens} tokens of a rank with an HCCL buffer of 200 MiB, and {max_tokens} with"
        f" {needed}: set " in limit.reason
    )
    assert limit.reason.endswith(
        "HCCL_BUFFSIZE" if chip is A2 else "ascend.communicator.groups.mc2.buffer_size"
    )
    assert buffer_mib(name, shape, tokens) <= 200 < buffer_mib(name, shape, tokens + 1)
    assert token_limit(chip, shape, internode, needed).tokens == max_tokens


def test_unknown_backend_is_refused() -> None:
    extension.parse_options(Options, {"all2all": "mc2"}, "ascend.communicator")
    with pytest.raises(
        extension.RefusedError,
        match=r"all2all is 'nccl'; supported: auto, allgather, alltoall, mc2",
    ):
        extension.parse_options(Options, {"all2all": "nccl"}, "ascend.communicator")
