# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Packing and unpacking of tokens, gathered on the device and as contiguous runs."""

from collections.abc import Callable

import pytest
import torch
from ascend_kv_connector.p2p import paged_cache as module
from ascend_kv_connector.p2p.paged_cache import Heads, PagedCache
from ascend_kv_connector.p2p.states import LAST_STATE


@pytest.mark.parametrize("direct", [0, 1 << 30], ids=["as they lie", "gathered"])
@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("blocks", [[3, 4, 5, 9], [9, 2, 3, 0]])
def test_pack_and_unpack_round_trip(
    blocks: list[int],
    device: str,
    direct: int,
    instances: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MIN_RUN_BYTES", direct)
    one, other = instances("p", device=device).caches[0], instances("d", device=device).caches[0]
    for number, held in enumerate(one.caches):
        held.copy_(torch.arange(held.numel()).view(held.shape) % 7919 + number)
    slots, there = one.slot_mapping(blocks, 2, 15), other.slot_mapping([7, 6, 5, 4], 2, 15)
    wanted, regions = Heads(1, 2) if direct else one.heads, [2, 0, 3]
    buffer = torch.zeros(4096, dtype=torch.uint8, pin_memory=device == "npu")
    size = one.pack(slots, regions, wanted, buffer)
    assert size == 13 * one.token_bytes(regions, wanted.num)
    if device == "npu":
        torch.npu.synchronize()
    other.unpack(there, regions, wanted, buffer[:size])
    mine = slice(wanted.first, sum(wanted))
    for index, (held, got) in enumerate(zip(one.caches, other.caches, strict=True)):
        sent = held.flatten(0, 1).cpu()[slots][:, mine] if index in regions else -1
        assert bool((got.flatten(0, 1).cpu()[there][:, mine] == sent).all())
        untouched = [row for row in range(64) if row not in there.tolist()]
        assert bool((got.flatten(0, 1).cpu()[untouched] == -1).all())


@pytest.mark.parametrize("first", ["state", "key"])
def test_blocks_are_counted_by_pages(first: str) -> None:
    """A state, which has no tokens, may be the first region; a block is two of the attention's."""
    regions = [
        ("linear", "state", torch.zeros(30, 1, 2, 100)),
        ("full", "key", torch.zeros(60, 8, 2, 4)),
    ]
    ordered = sorted(regions, key=lambda region: region[1] != first)
    cache = PagedCache(
        ordered, 16, Heads(0, 2), 2, {"linear": 0, "full": 1}, (LAST_STATE, 0), (0, 1)
    )
    assert cache.blocks == 30
