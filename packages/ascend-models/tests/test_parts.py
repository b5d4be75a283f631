# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Parts of the models against the formulas in float64."""

import random

import pytest
import torch
from ascend_models.common import hyper_connections, routing, rows, sparse_attention
from ascend_models.common.rotary import rotate
from ascend_models.minimax_m3 import blocks


@pytest.mark.parametrize("group", [4, 128])
def test_ends_of_groups_are_those_of_each_position(group: int) -> None:
    chance = random.Random(group)
    for _ in range(50):
        sizes = [chance.randrange(0, 3 * group) for _ in range(4)]
        before = [chance.randrange(0, 2 * group) for _ in range(4)]
        starts = [sum(sizes[:i]) for i in range(5)]
        positions = [p for n, b in zip(sizes, before, strict=True) for p in range(b, b + n)]
        expected = [i for i, p in enumerate(positions) if (p + 1) % group == 0]
        after = [n + b for n, b in zip(sizes, before, strict=True)]
        assert rows.group_ends(starts, after, group).tolist() == expected


def test_rotation_is_of_pairs_of_neighbours_and_can_be_undone() -> None:
    x, angles = torch.randn(5, 3, 96), torch.rand(5, 32) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).npu()
    turned = rotate(x.npu(), table).cpu()
    pairs = torch.view_as_complex(x[..., 32:].double().unflatten(-1, (32, 2)))
    exact = pairs * torch.polar(torch.ones(5, 1, 32).double(), angles.double().unsqueeze(1))
    assert torch.equal(turned[..., :32], x[..., :32])
    assert (turned[..., 32:] - torch.view_as_real(exact).flatten(-2)).abs().max() < 1e-6
    assert (rotate(turned.npu(), table, inverse=True).cpu() - x).abs().max() < 1e-6


def test_attention_leaves_out_absent_rows_and_counts_sinks() -> None:
    query, sinks = torch.randn(6, 4, 64), torch.randn(4)
    caches = torch.randn(40, 64), torch.randn(20, 64)
    caches[0][0] = torch.nan  # of the null block
    slots = [torch.randint(1, len(cache), (6, 7)) for cache in caches]
    slots[0][2:, 3:], slots[1][4] = -1, -1
    pairs = [(cache.npu(), each.npu()) for cache, each in zip(caches, slots, strict=True)]
    result = sparse_attention.attend(query.npu(), pairs, sinks.npu(), 0.3).cpu()
    for token in range(6):
        selected = [c[s[token][s[token] >= 0]] for c, s in zip(caches, slots, strict=True)]
        values = torch.cat(selected).double()
        logits = torch.cat((0.3 * query[token].double() @ values.t(), sinks.double()[:, None]), 1)
        exact = logits.softmax(-1)[:, :-1] @ values
        assert (result[token] - exact).abs().max() < 1e-5


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_sinkhorn_divides_columns_and_rows_in_turn(steps: int) -> None:
    given, eps = (3 * torch.randn(9, 4, 4)).softmax(-1) + 1e-6, 1e-6
    exact = given.double()
    exact = exact / (exact.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        exact = exact / (exact.sum(-1, keepdim=True) + eps)
        exact = exact / (exact.sum(-2, keepdim=True) + eps)
    result = hyper_connections.sinkhorn(given.npu(), steps, eps).cpu()
    assert (result - exact).abs().max() < 2e-6


@pytest.mark.parametrize("has_table", [False, True])
def test_routing_selects_by_bias_or_by_table(has_table: bool) -> None:
    logits, bias, tokens = torch.randn(11, 8), torch.randn(8), torch.randint(0, 30, (11,))
    table = torch.stack([torch.randperm(8)[:2] for _ in range(30)]).int()
    ids = torch.empty(11, 2, dtype=torch.int32).npu()
    weights, result = routing.topk_softplus_sqrt(
        ids.float(),
        ids,
        ids,
        logits.npu(),
        True,
        None if has_table else bias.npu(),
        tokens.npu(),
        table.npu() if has_table else None,
        1.5,
    )
    scores = (1 + logits.double().exp()).log().sqrt()
    chosen = table[tokens].long() if has_table else (scores + bias).topk(2).indices
    exact = scores.gather(1, chosen)
    assert result.cpu().tolist() == chosen.tolist()
    assert (weights.cpu() - 1.5 * exact / exact.sum(-1, keepdim=True)).abs().max() < 1e-6


SIZE, HEADS, GROUP, WIDTH = 16, 2, 3, 32
"""Keys of a block; KV heads, the query heads of each, and their elements."""


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("factor", [0, 100], ids=["gathered", "masked"])
def test_blocks_are_selected_and_attended_to_for_each_head(
    first: int, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "DENSE_FACTOR", factor)
    monkeypatch.setattr(blocks, "MAX_ELEMENTS", 9000)  # several chunks
    torch.manual_seed(first)
    lengths, news = [100, 33, 97, 20], [1, 1, 40, 20]
    starts = [sum(news[:i]) for i in range(5)]
    positions = torch.cat([torch.arange(n - new, n) for n, new in zip(lengths, news, strict=True)])
    owners = torch.arange(4).repeat_interleave(torch.tensor(news))
    table = 1 + torch.randperm(28).view(4, 7)
    index_keys = torch.full((30, SIZE, WIDTH), torch.nan)
    keys, values = torch.full((2, 30, HEADS, SIZE, WIDTH), torch.nan)
    for request, length in enumerate(lengths):
        for position in range(length):
            page, row = table[request, position // SIZE], position % SIZE
            index_keys[page, row] = torch.randn(WIDTH)
            keys[page, :, row], values[page, :, row] = torch.randn(2, HEADS, WIDTH)
    index_query = torch.randn(len(owners), HEADS, WIDTH)
    query = torch.randn(len(owners), HEADS * GROUP, WIDTH)
    meta = rows.RowsMetadata(
        block_table=table.int().npu(),
        block_rows=SIZE,
        slot_mapping=torch.tensor([]),
        requests=owners.npu(),
        query_start_loc=starts,
        seq_lens=lengths,
        ends=torch.tensor([]),
        longest=max(lengths),
    )
    selection = blocks.Selection(size=SIZE, topk=3, first=first, local=1)
    at, pages = positions.npu(), blocks.BlockPages(keys.npu(), values.npu())
    chosen = blocks.select(index_query.npu(), index_keys.npu(), meta, at, selection)
    result = blocks.attend(query.npu(), pages, meta, at, chosen, 0.3).cpu()
    for token, (owner, position) in enumerate(zip(owners, positions, strict=True)):
        known = torch.arange(int(position) + 1)
        where = table[owner, known // SIZE], known % SIZE
        for head in range(HEADS):
            scores = index_keys[where].double() @ index_query[token, head].double()
            best = [part.max().item() for part in scores.split(SIZE)]
            best[-1] = torch.inf
            if first:
                best[0] = torch.inf
            wanted = sorted(range(len(best)), key=lambda block: -best[block])[:3]
            assert {*chosen[token, head].tolist()} - {-1} == {*wanted}
            seen = torch.isin(known // SIZE, torch.tensor(wanted))
            some = where[0][seen], head, where[1][seen]
            mine = slice(head * GROUP, (head + 1) * GROUP)
            logits = 0.3 * query[token, mine].double() @ keys[some].double().t()
            exact = logits.softmax(-1) @ values[some].double()
            assert (result[token, mine] - exact).abs().max() < 1e-5
