# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Draft tokens in the V2 runner: kernels in PyTorch, compared with a loop for each of vLLM's."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ascend_platform.overrides import table
from ascend_platform.runners.v2.kernels import input_batch
from ascend_platform.runners.v2.kernels.step import running
from harness.references.v2_batches import ROWS, STEPS, VOCABULARY, WIDTH, Drafts, device
from packaging.version import Version
from vllm import __version__ as vllm_version

if Version(vllm_version).release < Version(table.V2_SINCE).release:
    pytest.skip("vLLM's V2 runner is another", allow_module_level=True)

from ascend_platform.runners.v2 import draft_lengths
from ascend_platform.runners.v2.kernels import speculator


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_inputs_of_a_step(seed: int, decode: bool) -> None:
    batch = Drafts(seed, decode)
    count, total = len(batch.rows), batch.logits[-1]
    input_ids, following, seq_lens = (
        device([-7] * 200),
        device([[-7] * ROWS] * 2),
        device([9] * ROWS),
    )
    mapping, starts, cumulative = (
        device(batch.rows, torch.int64),
        batch.query_start_loc(),
        device(batch.logits),
    )
    prefill_len, computed = device(batch.prefill_len), device(batch.computed)
    with running(batch.step):
        states, places = input_batch.expand_idx_mapping(mapping, total, cumulative, STEPS + 1)
        if batch.step.has_prefill:
            input_batch.prepare_prefill_inputs(
                input_ids, following, mapping, starts, device(batch.tokens), prefill_len, computed
            )
        input_batch.prepare_pos_seq_lens(
            mapping, starts, computed, device([0] * 200, torch.int64), seq_lens
        )
        indices = input_batch.combine_sampled_and_draft_tokens(
            input_ids, mapping, device([[token] for token in batch.last], torch.int64), starts, seq_lens, prefill_len,
            device(batch.drafted, torch.int64), cumulative, total,
        )  # fmt: skip
    expected = {}
    wanted: tuple[list[int], list[int], list[int]] = ([], [], [])
    for number, row in enumerate(batch.rows):
        end, drafts = batch.starts[number + 1], batch.drafts[number]
        for place in range(drafts + 1):
            for values, value in zip(wanted, (row, place, end - drafts - 1 + place), strict=True):
                values.append(value)
        if batch.computed[row] < batch.prefill_len[row]:
            for offset in range(
                min(batch.lengths[number], batch.prefill_len[row] - batch.computed[row])
            ):
                expected[batch.starts[number] + offset] = batch.tokens[row][
                    batch.computed[row] + offset
                ]
            for ahead in range(2):
                place = batch.seq_lens[number] + ahead
                assert following[ahead, row] == (
                    batch.tokens[row][place] if place < batch.prefill_len[row] else 0
                )
        if batch.seq_lens[number] > batch.prefill_len[row]:
            if batch.seq_lens[number] - drafts - 1 >= batch.prefill_len[row]:
                expected[end - drafts - 1] = batch.last[row]
            expected |= {end - drafts + place: batch.drafted[row][place] for place in range(drafts)}
    assert (states.tolist(), places.tolist(), indices.tolist()) == wanted
    assert {index: input_ids[index].item() for index in range(batch.num_tokens)} == expected
    assert seq_lens.tolist() == batch.seq_lens + [0] * (ROWS - count)


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_states_after_a_step(seed: int, earlier: bool) -> None:
    """`earlier`: a batch of a pipeline that another stage has sampled, with its next
    draft tokens."""
    batch, rng = Drafts(seed), random.Random(seed)
    rows = [-1 if earlier and rng.random() < 0.3 else row for row in batch.rows]
    sampled = [rng.randint(0, drafts + 1) for drafts in batch.drafts]
    rejected = [rng.randint(0, 2) for _ in batch.rows]
    tokens = [[rng.randrange(VOCABULARY) for _ in range(STEPS + 1)] for _ in batch.rows]
    bins = [[rng.randrange(3) for _ in range(VOCABULARY)] for _ in range(ROWS)]
    proposed = [[rng.randrange(VOCABULARY) for _ in range(STEPS)] for _ in batch.rows]
    computed, total, table, last = (
        device(each) for each in (batch.computed, batch.total, batch.tokens, batch.last)
    )
    last, binned, drafted = last.long()[:, None], device(bins), device(batch.drafted, torch.int64)
    input_batch.post_update(
        device(rows, torch.int64), computed, last, binned, VOCABULARY, device(tokens, torch.int64), STEPS + 1, device(sampled),
        device(rejected), None if earlier else batch.query_start_loc(), table, WIDTH, total,
        device(proposed, torch.int64) if earlier else None, drafted if earlier else None, STEPS if earlier else 0, num_warps=1,
    )  # fmt: skip
    for number, row in enumerate(rows):
        if row < 0:
            continue
        for token in tokens[number][: sampled[number]]:
            batch.last[row] = batch.tokens[row][batch.total[row]] = token
            batch.total[row] += 1
            bins[row][token] += 1
        batch.computed[row] += (0 if earlier else batch.lengths[number]) - rejected[number]
        if earlier:
            batch.drafted[row] = proposed[number]
    assert (last[:, 0].tolist(), total.tolist(), computed.tolist()) == (
        batch.last,
        batch.total,
        batch.computed,
    )
    assert (table.tolist(), binned.tolist(), drafted.tolist()) == (
        batch.tokens,
        bins,
        batch.drafted,
    )


def buffers(size: int = 200) -> Any:
    return SimpleNamespace(
        input_ids=device([-7] * size), positions=device([-7] * size, torch.int64), query_start_loc=device([-7] * (ROWS + 1)),
        seq_lens=device([-7] * ROWS),
    )  # fmt: skip


def of_target(batch: Drafts, seed: int) -> tuple[Any, list[int], list[int], list[int], list[int]]:
    """The target's step, its tokens and positions, and how many tokens each request has sampled and
    rejected."""
    rng, count = random.Random(seed), len(batch.rows)
    tokens = [rng.randrange(VOCABULARY) for _ in range(batch.num_tokens)]
    places = [
        batch.computed[row] + at
        for row, length in zip(batch.rows, batch.lengths, strict=True)
        for at in range(length)
    ]
    has_more = [
        batch.seq_lens[number] < batch.prefill_len[row] for number, row in enumerate(batch.rows)
    ]
    rejected = [rng.randint(0, drafts) for drafts in batch.drafts]
    sampled = [
        0 if more else drafts + 1 - each
        for more, drafts, each in zip(has_more, batch.drafts, rejected, strict=True)
    ]
    step = SimpleNamespace(
        num_reqs=count, num_tokens=batch.num_tokens, idx_mapping=device(batch.rows, torch.int64),
        query_start_loc=batch.query_start_loc(), seq_lens=device(batch.seq_lens), input_ids=device(tokens),
        positions=device(places, torch.int64),
    )  # fmt: skip
    return step, tokens, places, sampled, rejected


@pytest.mark.parametrize("seed", range(6))
def test_inputs_of_eagle_and_mtp(seed: int) -> None:
    batch, drafter, limit = Drafts(seed), buffers(), 62
    step, tokens, places, sampled, rejected = of_target(batch, seed)
    following = [[20 + row for row in range(ROWS)]]
    last, draft_step = device([-7] * ROWS, torch.int64), device(5, torch.int64)
    speculator.prepare_shifted_inputs(
        last, draft_step, drafter, step, device(sampled), device(rejected), device([[each] for each in batch.last], torch.int64),
        device(following), ROWS,
    )  # fmt: skip
    ends = []
    for number, row in enumerate(batch.rows):
        first, length = batch.starts[number], batch.lengths[number] - rejected[number]
        ends.append(first + length - 1)
        added = batch.last[row] if sampled[number] else following[0][row]
        assert drafter.input_ids[first : first + length].tolist() == [
            *tokens[first + 1 : first + length],
            added,
        ]
        assert drafter.positions[first : first + length].tolist() == places[first : first + length]
    count = len(batch.rows)
    assert last.tolist() == ends + [0] * (ROWS - count)
    assert drafter.seq_lens.tolist() == batch.seq_lens + [0] * (ROWS - count)
    assert drafter.query_start_loc.tolist() == batch.starts + [batch.num_tokens] * (ROWS - count)
    assert draft_step.item() == 0

    drafter.positions[:count] = device([places[end] for end in ends], torch.int64)
    keys = device([3] * ROWS, torch.int64)
    speculator.prepare_decode_inputs(
        device([9] * count, torch.int64),
        step.seq_lens,
        device(rejected),
        drafter,
        keys,
        limit,
        ROWS,
    )
    now = [min(places[end] + 1, limit - 1) for end in ends]
    lengths = [
        min(length - each + 1, limit) for length, each in zip(batch.seq_lens, rejected, strict=True)
    ]
    assert drafter.positions[:count].tolist() == now
    assert drafter.seq_lens.tolist() == lengths + [0] * (ROWS - count)
    assert drafter.query_start_loc.tolist() == [min(each, count) for each in range(ROWS + 1)]
    assert (drafter.input_ids[:count].tolist(), keys.tolist()) == (
        [9] * count,
        [4] * count + [3] * (ROWS - count),
    )

    drafts, hidden, kept = (
        device([[0] * STEPS] * ROWS, torch.int64),
        torch.randn(count, 4).npu(),
        torch.zeros(ROWS, 4).npu(),
    )
    speculator.update_draft_inputs(
        device([6] * count, torch.int64),
        device(1, torch.int64),
        hidden,
        drafts,
        kept,
        drafter,
        keys,
        count,
        limit,
        STEPS,
    )
    assert drafts.tolist() == [[0, 6, 0]] * count + [[0] * STEPS] * (ROWS - count)
    assert torch.equal(kept[:count], hidden)
    assert drafter.positions[:count].tolist() == [min(each + 1, limit - 1) for each in now]
    assert drafter.seq_lens[:count].tolist() == [min(each + 1, limit) for each in lengths]


@pytest.mark.parametrize("seed", range(6))
def test_inputs_of_a_draft_model(seed: int) -> None:
    batch, drafter, limit = Drafts(seed), buffers(), 62
    step, tokens, places, _, rejected = of_target(batch, seed)
    ids, positions, last = (
        device([-7] * 200),
        device([-7] * 200, torch.int64),
        device([-7] * ROWS, torch.int64),
    )
    total = speculator.prepare_extended_inputs(
        drafter,
        step,
        device([[each] for each in batch.last], torch.int64),
        device(rejected),
        ids,
        positions,
        last,
        ROWS,
        limit,
    )
    expected, numbers, ends, starts = [], [], [], []
    for number, row in enumerate(batch.rows):
        first, end, valid = (
            batch.starts[number],
            batch.starts[number + 1],
            batch.lengths[number] - rejected[number],
        )
        starts.append(len(expected))
        ends.append(len(expected) + valid)
        expected += tokens[first : first + valid] + [batch.last[row]] + [0] * (end - first - valid)
        numbers += [min(places[first] + offset, limit - 1) for offset in range(end - first + 1)]
    count = len(batch.rows)
    assert total == len(expected)
    assert (ids[:total].tolist(), positions[:total].tolist()) == (expected, numbers)
    assert last.tolist() == ends + [0] * (ROWS - count)
    assert drafter.query_start_loc.tolist() == starts + [total] * (ROWS + 1 - count)
    assert drafter.seq_lens.tolist() == [min(each + 1, limit) for each in batch.seq_lens] + [0] * (
        ROWS - count
    )


@pytest.mark.parametrize("seed", range(12))
def test_ngrams(seed: int) -> None:
    rng, low, high = random.Random(seed), 1 + seed % 2, 3
    tokens = [[rng.randrange(3) for _ in range(WIDTH)] for _ in range(ROWS)]
    lengths = [rng.randint(1, WIDTH) for _ in range(ROWS)]
    rows, last = rng.sample(range(ROWS), 5), [30 + row for row in range(ROWS)]
    sampled = [rng.randint(0, 1) for _ in rows]
    scratch, drafts = (
        device([[9] * 2] * ROWS, torch.int64),
        device([[-7] * STEPS] * ROWS, torch.int64),
    )
    given = device(tokens), WIDTH, device(rows, torch.int64), device(lengths), device(sampled)
    speculator.find_ngrams(*given, scratch, 2, WIDTH, low, high, 4, 64, num_warps=4, num_stages=2)
    speculator.take_ngrams(
        *given,
        device(last, torch.int64),
        scratch,
        2,
        drafts,
        WIDTH,
        2,
        STEPS,
        4,
        2,
        num_warps=2,
        num_stages=1,
    )
    for number, row in enumerate(rows):
        text, expected = tokens[row][: lengths[row]], [last[row]] * STEPS
        for n in range(min(high, len(text) - 1), low - 1, -1):
            actual = [
                place for place in range(len(text) - n) if text[place : place + n] == text[-n:]
            ]
            if actual and sampled[number]:
                following = text[actual[-1] + n :][:STEPS]
                expected = following + expected[len(following) :]
                break
        assert drafts[number].tolist() == expected


def test_lengths_while_draft_tokens_are_in_flight() -> None:
    """The scheduler counts the last step's draft tokens as accepted, unless it has seen the step's
    result."""
    lengths = draft_lengths.DraftLengths(4)
    for row, computed in ((0, 5), (2, 7)):
        lengths.add(row, computed)
    rows = np.array([2, 0])
    assert lengths.before(rows, np.array([7, 5])) is None
    lengths.reject(draft_lengths.Rejections(rows, device([2, 0])))
    lengths.advance(rows, np.array([4, 3]))
    before = lengths.before(np.array([0, 2]), np.array([8, 11]))  # 5 + 3, 7 + 4
    assert before is not None
    assert before.count() == [0, 2]
    assert lengths.before(np.array([0, 2]), np.array([8, 9])) is None
    lengths.reject(draft_lengths.Rejections(rows, device([3, 1])))
    lengths.advance(rows, np.array([4, 4]))
    lengths.add(2, 1)  # another request in its row
    # The scheduler knows that one of 8 + 4 is rejected.
    before = lengths.before(np.array([2, 0]), np.array([1, 11]))
    assert before is not None
    assert before.count() == [0, 0]


def test_lengths_that_a_drafter_needs_first() -> None:
    """The target has attention without sequence lengths on the host."""
    lengths, rows = draft_lengths.DraftLengths(2), np.array([1])
    lengths.add(1, 5)
    lengths.reject(draft_lengths.Rejections(rows, device([2])))
    lengths.advance(rows, np.array([4]))
    before = lengths.before(rows, np.array([9]))
    lengths.reject(draft_lengths.Rejections(rows, device([1])))
    lengths.advance(rows, np.array([4]))
    assert before is not None
    assert before.count() == [2]
    before = lengths.before(rows, np.array([11]))
    assert before is not None
    assert before.count() == [1]


def test_lengths_while_steps_of_a_pipeline_are_in_flight() -> None:
    lengths, first, second = draft_lengths.DraftLengths(2), np.array([0]), np.array([1])
    lengths.add(0, 5)
    lengths.reject(draft_lengths.Rejections(first, device([2])))
    lengths.advance(first, np.array([4]))
    lengths.reject(None)
    lengths.add(1, 7)
    assert lengths.before(second, np.array([7])) is None
    before: Any = lengths.before(first, np.array([9]))
    assert before.count() == [2]
