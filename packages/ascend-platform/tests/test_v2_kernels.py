# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The V2 runner's kernels in PyTorch, compared with a loop for each kernel of vLLM's, written from
what it computes."""

import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ascend_platform.overrides import table
from ascend_platform.runners.v2.kernels import buffers, input_batch
from ascend_platform.runners.v2.kernels.device_step import DeviceStep
from ascend_platform.runners.v2.kernels.host_step import HostStep
from ascend_platform.runners.v2.kernels.step import running
from harness.references.v2_batches import ROWS, VOCABULARY, WIDTH, Batch, device
from packaging.version import Version
from vllm import __version__ as vllm_version

SINCE_V2 = pytest.mark.skipif(
    Version(vllm_version).release < Version(table.V2_SINCE).release,
    reason="vLLM's V2 runner is another",
)
BATCHES = [
    (seed, decode, empty)
    for seed in range(8)
    for decode, empty in ((False, False), (False, True), (True, False))
]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("seed", "decode", "empty"), BATCHES)
def test_inputs_of_a_step(seed: int, decode: bool, empty: bool, on_host: bool) -> None:
    batch = Batch(seed, decode, empty)
    input_ids, positions = device([-7] * 200), device([-7] * 200, torch.int64)
    seq_lens, following = device([9] * ROWS), device([[0] * ROWS])
    idx_mapping, starts = device(batch.rows, torch.int64), batch.query_start_loc()
    prefill_len, computed = device(batch.prefill_len), device(batch.computed)
    count = len(batch.rows)
    with running(batch.step_on_host if on_host else batch.step):
        if batch.step.has_prefill:
            input_batch.prepare_prefill_inputs(
                input_ids,
                following,
                idx_mapping,
                starts,
                device(batch.tokens),
                prefill_len,
                computed,
            )
        input_batch.prepare_pos_seq_lens(idx_mapping, starts, computed, positions, seq_lens)
        last = None
        if not empty:  # A request without tokens has no logits.
            last = input_batch.combine_sampled_and_draft_tokens(
                input_ids, idx_mapping, device([[token] for token in batch.last], torch.int64), starts, seq_lens,
                prefill_len, device([[]] * ROWS), device(list(range(count + 1))), count,
            )  # fmt: skip

    expected, places = [-7] * 200, [-7] * 200
    for number, row in enumerate(batch.rows):
        for offset in range(batch.lengths[number]):
            places[batch.starts[number] + offset] = batch.computed[row] + offset
            if batch.computed[row] < batch.prefill_len[row]:
                expected[batch.starts[number] + offset] = batch.tokens[row][
                    batch.computed[row] + offset
                ]
        if last is not None and batch.seq_lens[number] > batch.prefill_len[row]:
            expected[batch.starts[number + 1] - 1] = batch.last[row]
    assert positions.tolist() == places
    assert seq_lens.tolist() == batch.seq_lens + [0] * (ROWS - count)
    if last is not None:
        assert torch.arange(200, device="npu")[last].tolist() == [
            end - 1 for end in batch.starts[1:]
        ]
        assert input_ids.tolist() == expected


def test_inputs_are_prepared_only_within_a_step() -> None:
    with pytest.raises(AssertionError, match=r"only prepared in NPUModelRunner\.prepare_inputs"):
        input_batch.prepare_pos_seq_lens(
            device([0]), device([0, 1]), device([0]), device([0]), device([0])
        )


def test_constants_are_shared_only_while_inputs_are_prepared() -> None:
    batch = Batch(0)
    asked = {"dtype": torch.int32, "device": torch.device("npu", 0)}
    with running(batch.step):
        batch.step.are_constants_shared = True
        for make, values in ((input_batch.arange, [0, 1, 2, 3]), (input_batch.zeros, [0] * 4)):
            first, second = make(4, **asked), make(4, **asked)
            assert (first.data_ptr(), first.tolist(), first.dtype) == (
                second.data_ptr(),
                values,
                torch.int32,
            )
            assert make(4, dtype=torch.int64, device="npu").dtype is torch.int64
    kept, separate = input_batch.zeros(4, **asked), input_batch.zeros(4, **asked)
    assert kept.data_ptr() != separate.data_ptr()


@pytest.mark.parametrize(("seed", "decode", "empty"), BATCHES)
def test_sampled_and_rejected(seed: int, decode: bool, empty: bool) -> None:
    batch = Batch(seed, decode, empty)
    rng, count = random.Random(seed), len(batch.rows)
    logits = [rng.randint(1, 4) for _ in batch.rows]
    sampled = [rng.randint(1, each) for each in logits]
    cumulative = [sum(logits[:number]) for number in range(count + 1)]
    num_sampled = device(sampled)
    lens = device(batch.seq_lens + [0] * (ROWS - count))
    arguments = (
        lens,
        device(cumulative),
        device(batch.rows, torch.int64),
        device(batch.prefill_len),
    )
    num_sampled, num_rejected = input_batch.get_num_sampled_and_rejected(num_sampled, *arguments)
    more = [
        batch.seq_lens[number] < batch.prefill_len[row] for number, row in enumerate(batch.rows)
    ]
    assert num_sampled.tolist() == [
        0 if has else each for has, each in zip(more, sampled, strict=True)
    ]
    wanted = [0 if has else n - each for has, n, each in zip(more, logits, sampled, strict=True)]
    assert num_rejected.tolist() == wanted


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize(
    ("lengths", "decode"), [(True, False), (False, False), (True, True), (False, True)]
)
@pytest.mark.parametrize("seed", range(6))
def test_post_update(seed: int, lengths: bool, decode: bool, counts: bool) -> None:
    """Without token counts the batch is an earlier one of a pipeline; in a decode step every
    request samples one token."""
    batch, rng = Batch(seed, decode), random.Random(seed)
    count = len(batch.rows)
    rows = [-1 if not lengths and rng.random() < 0.25 else row for row in batch.rows]
    # A full row, which has no space for a token that is not sampled either.
    batch.total[batch.rows[0]] = WIDTH
    sampled = [0 if batch.total[row] == WIDTH else rng.randint(0, 1) for row in batch.rows]
    rejected = [rng.randint(0, 1) for _ in batch.rows]
    if decode and lengths:
        batch.total[batch.rows[0]], sampled, rejected = WIDTH - 1, [1] * count, [0] * count
    tokens = [rng.randrange(VOCABULARY) for _ in batch.rows]
    bins = [[rng.randrange(3) for _ in range(VOCABULARY)] for _ in range(ROWS)]
    computed, total, table = device(batch.computed), device(batch.total), device(batch.tokens)
    last, binned = device([[token] for token in batch.last], torch.int64), device(bins)
    with running(batch.step):
        input_batch.post_update(
            device(rows, torch.int64), computed, last, binned if counts else None, VOCABULARY,
            device([[token] for token in tokens], torch.int64), 1, device(sampled), device(rejected),
            batch.query_start_loc() if lengths else None, table, WIDTH, total, None, None, 0, num_warps=1,
        )  # fmt: skip
    for number in range(count):
        if (row := rows[number]) < 0:
            continue
        if sampled[number]:
            batch.last[row] = tokens[number]
            batch.tokens[row][batch.total[row]] = tokens[number]
            batch.total[row] += 1
            bins[row][tokens[number]] += counts
        batch.computed[row] += (batch.lengths[number] if lengths else 0) - rejected[number]
    assert (last[:, 0].tolist(), total.tolist(), computed.tolist()) == (
        batch.last,
        batch.total,
        batch.computed,
    )
    assert table.tolist() == batch.tokens
    assert binned.tolist() == bins


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize(("seed", "decode", "empty"), BATCHES)
def test_states_are_the_same_by_what_the_host_knows(
    seed: int, decode: bool, empty: bool, counts: bool
) -> None:
    batch, rng = Batch(seed, decode, empty), random.Random(seed)
    count, mapping = len(batch.rows), device(batch.rows, torch.int64)
    tokens = device([[rng.randrange(VOCABULARY)] for _ in batch.rows], torch.int64)
    lens = device(batch.seq_lens + [0] * (ROWS - count))
    given = lens, device(list(range(count + 1))), mapping, device(batch.prefill_len)
    result = []
    for step in (batch.step, batch.step_on_host):
        sampled, table, computed, total = map(
            device, ([1] * count, batch.tokens, batch.computed, batch.total)
        )
        batch.step_on_host.table = table
        last, bins = (
            device([[token] for token in batch.last], torch.int64),
            device([[0] * VOCABULARY] * ROWS),
        )
        with running(step):
            if step is batch.step_on_host:  # It also sends the indices of a decode step.
                outputs = device([0] * 200, torch.int64), device([0] * ROWS)
                input_batch.prepare_pos_seq_lens(
                    mapping, batch.query_start_loc(), computed, *outputs
                )
            sampled, rejected = input_batch.get_num_sampled_and_rejected(sampled, *given)
            copied = input_batch.copy_to_np(sampled)
            torch.npu.synchronize()
            assert (copied.tolist(), copied.dtype) == (sampled.tolist(), np.int32)
            assert isinstance(sampled, buffers.KnownTensor) is (step is batch.step_on_host)
            assert type(sampled + 1) is torch.Tensor
            input_batch.post_update(
                mapping, computed, last, bins if counts else None, VOCABULARY, tokens, 1, sampled, rejected,
                batch.query_start_loc(), table, WIDTH, total, None, None, 0, num_warps=1,
            )  # fmt: skip
        result.append([each.tolist() for each in (sampled, rejected, table, bins)])
        if step is batch.step:  # The host's view of the next step.
            after = HostStep(
                batch.step_on_host.rows,
                np.ones(count),
                computed.cpu().numpy()[batch.rows],
                batch.step_on_host.prefill_len,
                table,
            )
            lengths = device([[0] * ROWS] * 4)
            after.write_lengths(mapping, lengths)
            assert (
                lengths[:2, mapping].tolist() == torch.stack((computed, total))[:, mapping].tolist()
            )
            assert not lengths[2:].any()
    assert result[0] == result[1]


@pytest.mark.parametrize("seed", range(3))
def test_post_update_without_sampling(seed: int) -> None:
    batch = Batch(seed, empty=True)
    computed = device(batch.computed)
    input_batch.post_update_num_computed_tokens(
        device(batch.rows, torch.int64), computed, batch.query_start_loc()
    )
    for row, length in zip(batch.rows, batch.lengths, strict=True):
        batch.computed[row] += length
    assert computed.tolist() == batch.computed


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("seed", "decode", "empty"), BATCHES)
def test_positions_of_multimodal_rotary_tables(
    seed: int, decode: bool, empty: bool, on_host: bool
) -> None:
    batch, dimensions = Batch(seed, decode, empty), 3
    rng = random.Random(seed)
    given = [[rng.randrange(99) for _ in range(WIDTH)] for _ in range(ROWS * dimensions)]
    deltas = [rng.randrange(-9, 9) for _ in range(ROWS)]
    positions = device([[-7] * 200] * dimensions, torch.int64)
    with running(batch.step_on_host if on_host else batch.step):
        input_batch.prepare_rope_positions(
            positions, 200, device(given), dimensions * WIDTH, WIDTH, device(deltas), device(batch.rows, torch.int64),
            batch.query_start_loc(), device(batch.prefill_len), device(batch.computed), BLOCK_SIZE=1024, NUM_DIMS=dimensions,
        )  # fmt: skip
    expected = [[-7] * 200 for _ in range(dimensions)]
    for number, row in enumerate(batch.rows):
        for offset in range(batch.lengths[number]):
            place, in_prefill = (
                batch.computed[row] + offset,
                batch.computed[row] < batch.prefill_len[row],
            )
            for axis in range(dimensions):
                value = given[row * dimensions + axis][place] if in_prefill else place + deltas[row]
                expected[axis][batch.starts[number] + offset] = value
    assert positions.tolist() == expected


@pytest.mark.parametrize("interleave", [1, 4])
def test_lengths_of_context_parallelism(interleave: int) -> None:
    lengths, ranks = [0, 1, 7, 8, 9, 33, 64], 3
    result = []
    for rank in range(ranks):
        local = torch.full((9,), 7, dtype=torch.int32, device="npu")
        arguments = local, device([*lengths, 5, 5]), len(lengths), ranks, rank, interleave
        result.append(
            input_batch.prepare_dcp_local_seq_lens(*arguments, num_reqs_padded=8).tolist()
        )
        owned = [
            sum(token // interleave % ranks == rank for token in range(length))
            for length in lengths
        ]
        assert local.tolist() == [*owned, 0, 0]
    assert [sum(each) for each in zip(*result, strict=True)] == [*lengths, 0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_staged_writes(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    one_dimension = seed % 3 == 0
    expected = [
        [rng.randrange(99) for _ in range(1 if one_dimension else WIDTH)] for _ in range(ROWS)
    ]
    gpu = device([row[0] for row in expected] if one_dimension else expected, dtype)
    staged: dict[str, list[Any]] = {"indices": [], "starts": [], "contents": [], "cu_lens": []}
    for row in rng.sample(range(ROWS), rng.randint(0, ROWS)):
        start = 0 if one_dimension else rng.randrange(WIDTH)
        piece = [
            rng.randrange(99) for _ in range(1 if one_dimension else rng.randint(1, WIDTH - start))
        ]
        expected[row][start : start + len(piece)] = piece
        staged["indices"].append(row)
        staged["starts"].append(start)
        staged["contents"] += piece
        staged["cu_lens"].append(len(staged["contents"]))
    tensor = SimpleNamespace(
        gpu=gpu, dtype=dtype, device=gpu.device, clear_staged_writes=staged.clear
    )
    for name, values in staged.items():
        setattr(tensor, f"_staged_write_{name}", values)
    buffers.apply_writes(tensor)
    assert gpu.view(ROWS, -1).tolist() == expected
    assert not staged or not staged["indices"]


@SINCE_V2
def test_new_requests_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from ascend_platform.runners.v2.kernels.buffers import NPURequestState
    from vllm.v1.worker.gpu import buffer_utils

    monkeypatch.setattr(buffer_utils, "is_uva_available", buffers.is_uva_available)
    monkeypatch.setattr(buffer_utils, "UvaBufferPool", buffers.PinnedBufferPool)
    states = NPURequestState(ROWS, WIDTH, WIDTH, 0, VOCABULARY, torch.device("npu"))
    tensors: tuple[Any, ...] = (
        states.num_computed_tokens,
        states.total_len,
        states.prompt_len,
        states.prefill_len,
    )
    expected, tokens = np.zeros((4, ROWS), int), np.zeros((ROWS, WIDTH), int)
    for together in (3, 0, 1):
        for number in range(together):
            known = [
                random.Random(number + together).randrange(VOCABULARY) for _ in range(7 + number)
            ]
            states.add_request(f"{together} {number}", 5, known, 2 * number, 9)
            row = states.req_id_to_index[f"{together} {number}"]
            expected[:, row] = 2 * number, len(known), 5, len(known)
            tokens[row, : len(known)] = known
        states.apply_staged_writes()
        assert [tensor.gpu.tolist() for tensor in tensors] == expected.tolist()
        assert states.all_token_ids.gpu.tolist() == tokens.tolist()
    assert not any(tensor._staged_write_indices for tensor in (*tensors[:2], states.all_token_ids))


def test_what_has_not_changed_is_not_copied() -> None:
    tensor = SimpleNamespace(np=np.zeros(5, np.int32), gpu=device([0] * 5))
    tensor.np[1] = 3
    assert buffers.copy_changed(tensor).tolist() == [0, 3, 0, 0, 0]
    tensor.gpu[4] = 8  # Unchanged, because there is nothing to copy.
    assert buffers.copy_changed(tensor).tolist() == [0, 3, 0, 0, 8]
    tensor.np[0] = 6
    assert buffers.copy_changed(tensor, 2).tolist() == [6, 3]
    assert tensor.gpu.tolist() == [6, 3, 0, 0, 8]


def test_inputs_of_the_last_step_are_not_copied() -> None:
    sent, starts = buffers.SentInputs(), device([0] * 3)
    first = sent.copy(np.array([5, 2]), device="npu", dtype=torch.int64)
    assert sent.copy(np.array([0, 1, 2], np.int32), out=starts) is starts
    assert sent.copy(np.array([5, 2]), device="npu", dtype=torch.int64) is first
    second = sent.copy(np.array([5, 3]), device="npu", dtype=torch.int64)
    assert (first.tolist(), second.tolist(), second.dtype) == ([5, 2], [5, 3], torch.int64)
    starts.fill_(7)  # by a dummy run
    assert sent.copy(np.array([0, 1, 2], np.int32), out=starts).tolist() == [7, 7, 7]
    sent.forget()
    assert sent.copy(np.array([0, 1, 2], np.int32), out=starts).tolist() == [0, 1, 2]


@SINCE_V2
def test_captures_leave_frozen_what_is() -> None:
    script = """
import gc
from ascend_platform.overrides import guard
guard.install("v2")
from vllm.v1.worker.gpu.model_runner import freeze_gc_for_cudagraph_capture
gc.freeze()
frozen = gc.get_freeze_count()
with freeze_gc_for_cudagraph_capture():
    assert not gc.isenabled()
assert gc.isenabled()
assert gc.get_freeze_count() > 0.99 * frozen > 100_000
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_pool_makes_a_tensor_of_each_copy() -> None:
    pool = buffers.PinnedBufferPool(4, torch.int32)
    first, second = pool.copy_to_uva([1, 2]), pool.copy_to_uva(np.array([3]))
    assert (first.tolist(), second.tolist(), first.dtype) == ([1, 2], [3], torch.int32)
    assert pool.copy_to_gpu(np.array([4, 5], np.int32), first) is first
    assert first.tolist() == [4, 5]


@SINCE_V2
@pytest.mark.parametrize("reach", [0, 20])
@pytest.mark.parametrize(("seed", "decode", "empty"), BATCHES)
def test_block_tables_and_slots(seed: int, decode: bool, empty: bool, reach: int) -> None:
    from ascend_platform.runners.v2.kernels.block_table import NPUBlockTables
    from vllm.v1.worker.gpu import buffer_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_utils, "UvaBufferPool", buffers.PinnedBufferPool)
        patch.setattr(buffer_utils.UvaBackedTensor, "copy_to_uva", buffers.copy_changed)
        patch.setattr(buffer_utils.StagedWriteTensor, "apply_write", buffers.apply_writes)
        batch, rng, size = Batch(seed, decode, empty), random.Random(seed), 16
        tables = NPUBlockTables(
            [size], ROWS, 512, [8], torch.device("npu"), dcp_sharded=[False], sliding_window_reach=[reach]
        )  # fmt: skip
        blocks = {row: [rng.randrange(1, 99) for _ in range(7)] for row in batch.rows}
        for row in batch.rows:
            tables.append_block_ids(row, (blocks[row],), overwrite=True)
        tables.apply_staged_writes()
        padded = len(batch.rows) + 1
        tables.input_block_tables[0].fill_(77)
        tables._num_dirty_rows = ROWS
        computed, mapping = device(batch.computed), device(batch.rows, torch.int64)
        (got,) = tables.gather_block_tables(mapping, padded, num_computed_tokens=computed)
        on_device = got.tolist()
        tables.input_block_tables[0][: len(batch.rows)].fill_(77)
        (got,) = tables.gather_block_tables(
            mapping, padded, num_computed_tokens=computed, step=batch.step_on_host
        )
        assert got.tolist() == on_device

        def is_gathered() -> bool:
            """Whether the next step of the same requests writes their tables."""
            tables.input_block_tables[0][: len(batch.rows)].fill_(78)
            (again,) = tables.gather_block_tables(
                mapping, padded, num_computed_tokens=computed, step=batch.step_on_host
            )
            gathered = again[: len(batch.rows)].tolist() != [[78] * again.shape[1]] * len(
                batch.rows
            )
            assert not gathered or again.tolist() == on_device
            return gathered

        has_nulls = bool(reach) and max(batch.computed[row] for row in batch.rows) - reach >= size
        assert is_gathered() == has_nulls
        tables.append_block_ids(batch.rows[0], (blocks[batch.rows[0]],), overwrite=True)
        tables.apply_staged_writes()
        assert is_gathered()
        tables.get_dummy_block_tables(1)
        assert is_gathered()
        got = tables.input_block_tables[0]
    expected = []
    for row in batch.rows:
        gone = max(batch.computed[row] - reach, 0) // size if reach else 0
        expected.append([0] * gone + blocks[row][gone:])
    assert got[: len(batch.rows), :7].tolist() == expected
    assert not tables.input_block_tables[0][len(batch.rows) :].any()

    places = [
        batch.computed[row] + i
        for row, length in zip(batch.rows, batch.lengths, strict=True)
        for i in range(length)
    ]
    owners = [
        row for row, length in zip(batch.rows, batch.lengths, strict=True) for _ in range(length)
    ]
    count = batch.num_tokens
    positions = device(places + [0] * 3, torch.int64)
    if empty and count == len(batch.rows):
        # As many tokens as requests means one each, because vLLM schedules no request without
        # tokens.
        return
    slots = tables.compute_slot_mappings(
        mapping, batch.query_start_loc(), positions, count + 3, num_tokens=count
    )
    wanted = [
        blocks[row][place // size] * size + place % size
        for row, place in zip(owners, places, strict=True)
    ]
    assert slots[0, :count].tolist() == wanted
    on_device = slots.tolist()
    assert (
        batch.step_on_host.compute_slot_mappings(
            tables, mapping, device([]), positions, count + 3, num_tokens=count
        ).tolist()
        == on_device
    )
    assert all(0 <= slot < size for slot in slots[0, count:].tolist())  # of the null block
    assert all(0 <= slot < size for slot in tables.get_dummy_slot_mappings(9)[0].tolist())


def test_each_logit_has_the_adapter_of_its_request() -> None:
    drafting = DeviceStep(np.array([3, 5, 1]), False, num_draft_tokens=np.array([2, 1, 0]))
    assert drafting.per_logit((7, 0, 9)) == (7, 7, 7, 0, 0, 9)
    assert DeviceStep(np.array([3, 5, 1]), True).per_logit((7, 0, 9)) == (7, 0, 9)
