# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Slot mappings computed instead of vLLM's kernel, on the device and on the host, compared with a
loop."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ascend_platform.overrides import guard
from ascend_platform.overrides.shims import SHIMS
from ascend_platform.runners.v1.kernels.slot_mapping import compute_slot_mapping, kernel, slots_of
from vllm.triton_utils import dispatcher


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(
    ("ranks", "rank", "interleave"), [(1, 0, 1), (2, 0, 1), (3, 2, 1), (2, 1, 8)]
)
@pytest.mark.parametrize("seed", range(4))
def test_slot_mapping(decode, block_size, ranks, rank, interleave, seed):
    rng = random.Random(seed)
    requests = rng.randint(1, 6)
    lengths = [1 if decode else rng.randint(1, 300) for _ in range(requests)]
    starts = [rng.randint(0, 5 * block_size) for _ in range(requests)]
    width = (5 * block_size + 300) // block_size + 1
    table = [[rng.randint(0, 999) for _ in range(width)] for _ in range(8)]
    positions = [
        start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)
    ]
    owners = [request for request, length in enumerate(lengths) for _ in range(length)]
    begins = [sum(lengths[:request]) for request in range(requests + 1)]
    slots = torch.zeros(2048, dtype=torch.int64, device="npu")
    compute_slot_mapping(
        len(positions),
        2048,
        torch.tensor(begins, dtype=torch.int32, device="npu"),
        torch.tensor(positions, device="npu"),
        torch.tensor(table, dtype=torch.int32, device="npu"),
        width,
        slots,
        block_size,
        ranks,
        rank,
        interleave,
        -1,
        1024,
    )
    # what is here
    turn = [place for place in range(max(positions) + 1) if place // interleave % ranks == rank]
    at = {place: number for number, place in enumerate(turn)}
    expected = [
        table[o][at[p] // block_size] * block_size + at[p] % block_size if p in at else -1
        for o, p in zip(owners, positions, strict=True)
    ]
    # The model runner's slots are those of padding.
    assert slots.tolist() == expected + [0] * (2048 - len(positions))
    blocks = SimpleNamespace(np=np.array(table, dtype=np.int32))
    of_host = SimpleNamespace(
        block_size=block_size, dcp_world_size=ranks, dcp_rank=rank, block_table=blocks
    )
    of_host.cp_kv_cache_interleave_size = interleave
    assert slots_of(of_host, np.array(owners), np.array(positions)).tolist() == expected


def test_kernels_are_registered_beside_numba(monkeypatch):
    """vLLM looks for copies of a kernel in every object of every module, and numba's library
    answers every name."""
    import numba

    assert numba.njit(lambda number: number + 1)(1) == 2
    name = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
    monkeypatch.delitem(dispatcher._registry, name, raising=False)
    guard.install("v1", "runners.v1.kernels.slot_mapping")
    assert dispatcher._registry[name][1] is kernel
    monkeypatch.setattr(dispatcher, "register_kernels", None)
    # As for a second engine, when there is nothing left to do.
    guard.install("v1", "runners.v1.kernels.slot_mapping")


@pytest.mark.parametrize("splits", [1, 2])
def test_slot_mapping_with_smaller_blocks_in_the_table(splits: int) -> None:
    """The slot mapping kernel of 0.31, whose block table may use smaller blocks than the
    KV cache."""
    # One request decodes, and one has three prompt tokens.
    size, positions, table = 16, [5, 40, 41, 42], [[7, 3, 9, 1], [2, 8, 4, 6]]
    slots = torch.zeros(8, dtype=torch.int64, device="npu")
    mapping = SHIMS["slot_mapping_kernel"].function(compute_slot_mapping)
    mapping(
        4, 8, torch.tensor([0, 1, 4], dtype=torch.int32, device="npu"), torch.tensor(positions, device="npu"),
        torch.tensor(table, dtype=torch.int32, device="npu"), 4, size, slots, size * splits, splits, 1, 0, 1, -1, 1024,
    )  # fmt: skip
    expected = [
        table[owner][p // size] * size + p % size
        for owner, p in zip([0, 1, 1, 1], positions, strict=True)
    ]
    assert slots.tolist() == expected + [0] * 4  # of no request: the model runner's
