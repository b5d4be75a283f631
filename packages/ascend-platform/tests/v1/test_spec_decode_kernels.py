# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""PyTorch implementations of vLLM's Triton kernels for speculative decoding, compared
with loops."""

import random
import types

import pytest
import torch
from ascend_platform.attention import length_bounds
from ascend_platform.overrides import guard
from ascend_platform.runners.v1.kernels import drafter, rejection

SEEDS = range(6)


def npu(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device="npu")


def batch(seed, longest=4):
    """A random generator, draft tokens per request, their cumulative sum, and the first draft token
    of each request."""
    rng = random.Random(seed)
    counts = [rng.randint(0, longest) for _ in range(rng.randint(1, 7))]
    if seed == 0:
        counts = [0, 0]
    sums = [sum(counts[: i + 1]) for i in range(len(counts))]
    return rng, counts, sums, [end - count for end, count in zip(sums, counts, strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
def test_expand(seed):
    rng, counts, sums, _ = batch(seed)
    values = [rng.choice([0.0, 0.5, 2.0]) for _ in counts]
    out = torch.empty(sums[-1], device="npu")
    rejection.expand(out, npu(values, torch.float32), npu(sums), 0.0, 1.0, 128)
    assert out.tolist() == [
        value or 1.0 for value, count in zip(values, counts, strict=True) for _ in range(count)
    ]


def emitted(counts, begins, tokens, accepted, bonus, rows, width):
    out = [[-1] * width for _ in counts]
    for request, count in enumerate(counts):
        if not rows[request]:
            continue
        for place in range(count):
            out[request][place] = tokens[begins[request] + place]
            if not accepted[begins[request] + place]:
                break
        else:
            out[request][count] = bonus[request]
    return out


@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.parametrize("all_greedy", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_rejection(seed, all_greedy, synthetic):
    rng, counts, sums, begins = batch(seed)
    total = sums[-1]
    choice = [rng.randint(0, 9) for _ in range(total)]
    drafts = [token if rng.random() < 0.7 else rng.choice([-1, 11]) for token in choice]
    bonus = [rng.randint(20, 29) for _ in counts]
    rows = [all_greedy or rng.random() < 0.5 for _ in counts]
    uniform, rates = [rng.random() for _ in range(total)], [0.9, 0.5, 0.3, 0.1]
    accepted = [draft == token for draft, token in zip(drafts, choice, strict=True)]
    tokens = choice
    if synthetic:
        places = [place for count in counts for place in range(count)]
        accepted = [
            u < rates[p] and d >= 0 for u, p, d in zip(uniform, places, drafts, strict=True)
        ]
        tokens = [d if a else c for d, a, c in zip(drafts, accepted, choice, strict=True)]
    out = npu([[-1] * 5 for _ in counts])
    rejection.rejection_greedy_sample(
        out,
        npu(sums),
        npu(drafts),
        npu(choice, torch.int64),
        npu(bonus, torch.int64).unsqueeze(1),
        None if all_greedy else npu(rows, torch.bool),
        4,
        npu(uniform, torch.float64) if synthetic else None,
        npu(rates, torch.float32) if synthetic else None,
        synthetic,
    )
    assert out.tolist() == emitted(counts, begins, tokens, accepted, bonus, rows, 5)


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_rejection(seed, with_probs):
    rng, counts, sums, begins = batch(seed)
    total, words = sums[-1], 12
    torch.manual_seed(seed)
    target = torch.rand(total, words).softmax(-1)
    draft = (torch.rand(total, words) * 3).softmax(-1)
    drafts = [rng.choice([-1, rng.randrange(words)]) for _ in range(total)]
    recovered, bonus = (
        [rng.randint(20, 29) for _ in range(total)],
        [rng.randint(30, 39) for _ in counts],
    )
    greedy = [rng.random() < 0.3 for _ in counts]
    uniform = [rng.random() * (1 if with_probs else 0.2) for _ in range(total)]
    accepted = [
        d >= 0 and float(target[i, d]) / (float(draft[i, d]) if with_probs else 1.0) >= uniform[i]
        for i, d in enumerate(drafts)
    ]
    tokens = [d if a else r for d, a, r in zip(drafts, accepted, recovered, strict=True)]
    out = npu([[-1] * 5 for _ in counts])
    rejection.rejection_random_sample(
        out,
        npu(sums),
        npu(drafts),
        draft.to("npu") if with_probs else None,
        target.to("npu"),
        npu(bonus, torch.int64).unsqueeze(1),
        npu(recovered),
        npu(uniform, torch.float64),
        npu(greedy, torch.bool),
        4,
        words,
        None,
        not with_probs,
        False,
    )
    assert out.tolist() == emitted(
        counts, begins, tokens, accepted, bonus, [not each for each in greedy], 5
    )


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_sample_recovered_tokens(seed, with_probs):
    rng, counts, sums, _ = batch(seed)
    total, words = sums[-1], 12
    torch.manual_seed(seed)
    target, draft = torch.rand(total, words).softmax(-1), torch.rand(total, words).softmax(-1)
    noise = torch.rand(len(counts), words) + 0.1
    drafts = [rng.choice([-1, *range(words)]) for _ in range(total)]
    owners = [request for request, count in enumerate(counts) for _ in range(count)]
    expected = []
    for i, owner in enumerate(owners):
        left = (target[i] - draft[i]).clamp_min(0) if with_probs else target[i].clone()
        if not with_probs and drafts[i] >= 0:
            left[drafts[i]] = 0
        expected.append(int((left * noise[owner]).argmax()))
    out = torch.full((total,), -7, dtype=torch.int32, device="npu")
    rejection.sample_recovered_tokens(
        out,
        npu(sums),
        npu(drafts),
        draft.to("npu") if with_probs else None,
        target.to("npu"),
        noise.to("npu"),
        words,
        8192,
        not with_probs,
        False,
    )
    assert out.tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_eagle_step(seed):
    rng = random.Random(seed)
    requests, padded, size, longest, blocks = rng.randint(1, 5), 7, 16, 64, 4
    positions = [rng.choice([0, 14, 15, 16, 30, 62, 63]) for _ in range(requests)]
    lengths = [position + 1 for position in positions]
    table = [[rng.randint(1, 99) for _ in range(blocks)] for _ in range(requests)]
    out_positions, out_slots, seq_lens = (
        npu([0] * 7, torch.int64),
        npu([5] * padded, torch.int64),
        npu(lengths),
    )
    given = npu(positions, torch.int64)
    drafter.eagle_step(
        given,
        npu(table),
        blocks,
        seq_lens,
        out_positions[:requests],
        out_slots,
        size,
        longest,
        blocks,
        -1,
        requests,
    )
    following = [position + 1 if position + 1 < longest else 0 for position in positions]
    past = [position + 1 >= longest for position in positions]
    assert out_positions.tolist()[:requests] == following
    rows = enumerate(zip(past, table, following, strict=True))
    # `n` is a slot of the null block.
    slots = [n if p else row[f // size] * size + f % size for n, (p, row, f) in rows]
    assert out_slots.tolist() == [*slots, *range(requests, padded)]
    assert seq_lens.tolist() == [
        1 if p else min(length + 1, longest) for p, length in zip(past, lengths, strict=True)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_eagle_prepare_inputs(seed):
    rng, counts, sums, _ = batch(seed)
    valid = [rng.randint(1, count + 1) for count in counts]
    ends = [sum(count + 1 for count in counts[: i + 1]) for i in range(len(counts))]
    last, rejected = npu([0] * len(counts)), npu([0] * len(counts))
    drafter.eagle_prepare_inputs(
        npu(sums), npu(valid), npu([0, *ends]), last, rejected, len(counts)
    )
    expected = [count + 1 - v if count else 0 for count, v in zip(counts, valid, strict=True)]
    assert rejected.tolist() == expected
    assert last.tolist() == [end - 1 - r for end, r in zip(ends, expected, strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
def test_eagle_prepare_next_token(seed):
    rng = random.Random(seed)
    requests, width = rng.randint(1, 6), 4
    rows = [[rng.choice([-1, 5, 99, 3, 100]) for _ in range(width)] for _ in range(requests)]
    discarded, backup = [rng.random() < 0.3 for _ in rows], [rng.randint(200, 300) for _ in rows]
    following, counts = npu([0] * requests), npu([0] * requests)
    drafter.eagle_prepare_next_token(
        npu(rows),
        npu(discarded, torch.bool),
        npu(backup),
        following,
        counts,
        100,
        width,
        requests,
        width,
        4,
    )
    good = [
        [] if d else [token for token in row if token not in (-1, 100)]
        for row, d in zip(rows, discarded, strict=True)
    ]
    assert counts.tolist() == [len(each) for each in good]
    assert following.tolist() == [
        each[-1] if each else b for each, b in zip(good, backup, strict=True)
    ]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_expand_eagle_inputs(seed, slots, shift):
    rng = random.Random(seed)
    requests = rng.randint(1, 5)
    lengths = [rng.randint(1, 6) for _ in range(requests)]
    rejected = [rng.randint(0, length - 1) for length in lengths]
    begins = [sum(lengths[:i]) for i in range(requests + 1)]
    total, added = begins[-1], slots - 1 if shift else slots
    tokens, following = (
        [rng.randint(1, 99) for _ in range(total)],
        [rng.randint(100, 199) for _ in range(requests)],
    )
    positions = [
        start + i
        for start, n in zip([rng.randint(0, 50) for _ in lengths], lengths, strict=True)
        for i in range(n)
    ]
    room = total + requests * added
    out = [[-5] * (room + 2) for _ in range(4)]
    new, mapping = [-5] * requests * slots, [-5] * total
    at = 0
    for i, (begin, length) in enumerate(zip(begins, lengths, strict=False)):
        kept = length - rejected[i]
        row = tokens[begin + int(shift) : begin + kept] + [following[i]] + [77] * (slots - 1)
        kinds = [(0, 0)] * (kept - int(shift) + 1) + [(0, 1)] * (slots - 1)
        new[i * slots : (i + 1) * slots] = range(
            at + kept - int(shift), at + kept - int(shift) + slots
        )
        mapping[begin : begin + length] = range(at, at + length)
        for place in range(length + added):
            padding = place >= len(row)
            out[0][at + place] = 0 if padding else row[place]
            out[1][at + place] = 0 if padding else positions[begin] + place
            out[2][at + place], out[3][at + place] = (1, 0) if padding else kinds[place]
        at += length + added
    result = [
        npu([-5] * (room + 2)),
        npu([-5] * (room + 2), torch.int64),
        *(npu([-5] * (room + 2)) for _ in range(2)),
    ]
    found_new, found_mapping = npu([-5] * len(new)), npu([-5] * total)
    ends = [
        begin + length - 1 - r for begin, length, r in zip(begins, lengths, rejected, strict=False)
    ]
    drafter.expand_eagle_inputs(
        npu(tokens),
        npu(positions, torch.int64),
        npu(following),
        *result,
        found_new,
        found_mapping,
        npu(begins),
        npu(ends),
        0,
        77,
        total,
        slots,
        shift,
        8,
    )
    assert at == room
    assert [each.tolist() for each in result] == out
    assert found_new.tolist() == new
    if shift:
        assert found_mapping.tolist() == mapping


def test_drafter_metadata_has_exact_host_lengths():
    """2 and 0 of 3 draft tokens are rejected in this step, and 0 and 1 were in the last one, as the
    host learns later."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode import llm_base_proposer

    for _ in range(2):  # the second time does nothing
        guard.install("v1", "runners.v1.kernels.drafter")
    starts = npu([0, 4, 8])
    given = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.cpu(),
        seq_lens=npu([7, 8]),
        num_reqs=2,
        num_actual_tokens=8,
        max_query_len=4,
        max_seq_len=9,
        block_table_tensor=npu([[1], [2]]),
        slot_mapping=npu([130, -1], torch.int64),
        seq_lens_cpu_upper_bound=torch.tensor([9, 9], dtype=torch.int32),
    )
    built, waits = [], []

    def count(name, rejected):
        def wait():
            waits.append(name)
            return rejected

        return wait

    def build(common_attn_metadata, draft_index):
        bounds = length_bounds.draft_length_bounds(common_attn_metadata)
        waited = waits.copy()
        lengths = length_bounds.host_lengths(common_attn_metadata, "this attention")
        built.append((bounds, waited, lengths, common_attn_metadata.slot_mapping.tolist()))
        waits.clear()

    group = types.SimpleNamespace(build_metadata_for_drafting=build, layer_names=[])
    config = types.SimpleNamespace(cache_config=types.SimpleNamespace(block_size=128))
    proposer = types.SimpleNamespace(draft_attn_groups=[group], vllm_config=config)
    reset = drafter.rejected_in_step.set(length_bounds.Rejected(count("this", [2, 0]), [3, 3]))
    with length_bounds.subtract_rejected(length_bounds.Rejected(count("last", [0, 1]))):
        for draft_index in (0, 1):
            llm_base_proposer.SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata(
                proposer, given, draft_index
            )
    drafter.rejected_in_step.reset(reset)
    slots = [130, 1]  # A slot in block 0, which belongs to no request.
    assert built == [(None, [], [9, 8], slots), (([9, 8], [3, 3]), ["last"], [7, 8], slots)]
    extended = llm_base_proposer.extend_all_queries_by_N(
        given, 2, npu([0, 1, 2]), given.slot_mapping
    )
    assert extended.seq_lens_cpu_upper_bound.tolist() == [11, 11]
    assert given.seq_lens_cpu_upper_bound.tolist() == [9, 9]


@pytest.mark.parametrize("padded", [3, 4, 130])
def test_drafter_padding_tokens_have_null_block_slots(padded):
    """Latent attention writes the keys of all tokens of a piecewise graph, and
    npu_scatter_pa_kv_cache rejects slot -1."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    guard.install("v1", "runners.v1.kernels.drafter")
    proposer = types.SimpleNamespace(
        _slot_mapping_buffer=npu([-1] * 200, torch.int64),
        _draft_attn_layer_names={"one", "other"},
        vllm_config=types.SimpleNamespace(cache_config=types.SimpleNamespace(block_size=128)),
    )
    # The second time the buffer's contents.
    for given in (npu([300, 301, 700], torch.int64), None):
        result = SpecDecodeBaseProposer._get_slot_mapping(proposer, padded, given)
        assert result.keys() == {"one", "other"}
        slots = result["one"].tolist()
        assert slots[:3] == [300, 301, 700]
        assert len(slots) == padded
        assert all(0 <= slot < 128 for slot in slots[3:])


def test_host_lengths_of_cross_attention_have_no_draft_tokens():
    common = types.SimpleNamespace(
        causal=False, num_reqs=2, seq_lens_cpu_upper_bound=torch.tensor([5, 6, 0])
    )
    with length_bounds.subtract_rejected(length_bounds.Rejected(lambda: [1, 1])):
        assert length_bounds.host_lengths(common, "this attention") == [5, 6]
        common.causal = True
        assert length_bounds.host_lengths(common, "this attention") == [4, 5]
