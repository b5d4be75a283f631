# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Operators that compute and communicate, against the plain mathematics of all ranks in float64
here."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("mc2_scenarios.py")
sys.path.insert(0, str(SCRIPT.parent))
programs = importlib.import_module("mc2_matmul_scenarios")
layer = importlib.import_module("mc2_layer")
data, routing, weights = programs.data, layer.routing, layer.weights
FACTORS, SHARED = layer.FACTORS, layer.SHARED_FACTORS
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def scenarios(run):
    """Every scenario's results by rank, from one process that imports torch once."""
    done = run("run", "--npus", "4", "--", sys.executable, str(SCRIPT))
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


def close(actual, expected, dtype, ulps=2):
    bound = ulps * torch.finfo(dtype).eps
    torch.testing.assert_close(
        torch.tensor(actual, dtype=torch.float64),
        expected.to(dtype).double(),
        rtol=bound,
        atol=bound,
    )


def combined(x, ids, scales, active=None, factors=FACTORS):
    """The layer for one rank's tokens: weighted answers of their experts."""
    table = torch.tensor(factors, dtype=torch.float64)[ids.long()] * scales.double()
    if active is not None:
        table = table * active
    return x.double() * table.sum(1, keepdim=True)


def mask_of(case, rank, tokens):
    """Which choices take part."""
    if case == "mask":
        return (torch.arange(tokens) < (rank % 3) * 2).unsqueeze(1).expand(tokens, 3)
    if case == "choices":
        return torch.arange(3 * tokens).view(tokens, 3) % 4 != rank % 4
    return torch.ones(tokens, 3, dtype=torch.bool)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("case", "tokens"), [("even", 6), ("uneven", 5), ("mask", 6), ("choices", 6)]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_dispatch_and_combine(scenarios, ranks, case, tokens, dtype):
    xs = [data(rank, (tokens, 64), dtype) for rank in range(ranks)]
    ids = [routing(rank, tokens, 3, 8, case == "uneven") for rank in range(ranks)]
    masks = [mask_of(case, rank, tokens) for rank in range(ranks)]
    local = 8 // ranks
    for rank, answer in enumerate(scenarios[f"moe {ranks}"]):
        y, rows, numbers, ends, sums = answer[f"{case} {dtype}"]
        close(y, combined(xs[rank], ids[rank], weights(rank, tokens, 3), masks[rank]), dtype)
        expected, counts = [], []
        for expert in range(rank * local, (rank + 1) * local):
            for source in range(ranks):
                wanted = ((ids[source] == expert) & masks[source]).any(1)
                expected.append(xs[source][wanted])
                counts.append(int(wanted.sum()))
        assert rows == programs.plain(torch.cat(expected))
        assert ends == torch.tensor(counts).cumsum(0).tolist()
        assert numbers == torch.tensor(counts).view(local, ranks).sum(1).tolist()
        assert sums == torch.tensor(numbers).cumsum(0).tolist()
        if case == "uneven" and rank >= ranks // 2:
            assert not any(counts)


def test_ranks_with_different_numbers_of_tokens(scenarios):
    for rank, y in enumerate(scenarios["different numbers of tokens"]):
        tokens = 2 + rank
        x, ids = data(rank, (tokens, 32), torch.float16), routing(rank, tokens, 2, 6)
        close(y, combined(x, ids, weights(rank, tokens, 2)), torch.float16)


def received(rank, ids, values):
    """Of each source's [tokens, choices, …] what this rank receives, in order; two
    experts a rank."""
    parts = []
    for expert in (2 * rank, 2 * rank + 1):
        for source, chosen in enumerate(ids):
            for token, row in enumerate(chosen.tolist()):
                parts += [values[source][token][k] for k, each in enumerate(row) if each == expert]
    return torch.stack(parts)


def test_quantized_dispatch(scenarios):
    ids = [routing(rank, 5, 2, 4) for rank in range(2)]
    smooth = data(0, (4, 64), torch.float32, salt=3).abs()
    for rank, (plain, smoothed, weighted, packed) in enumerate(scenarios["quantized"]):
        for (values, steps, _), factor in ((plain, torch.ones(4, 64)), (smoothed, smooth)):
            wide = []
            for source in range(2):
                x = data(source, (5, 64), torch.bfloat16)
                x[1] = 0
                wide.append(x.double().unsqueeze(1) * factor[ids[source].long()].double())
            expected = received(rank, ids, wide)
            step = expected.abs().amax(1) / 127
            torch.testing.assert_close(torch.tensor(steps).double(), step, rtol=1e-6, atol=0)
            rounded = torch.tensor(values).double()
            assert rounded.abs().max() == 127
            assert (rounded * step.unsqueeze(1) - expected).abs().max() <= step.max() * 0.501
        moved = received(rank, ids, [weights(source, 5, 2) for source in range(2)])
        assert weighted[0] == programs.plain(moved)
        words = [
            (torch.arange(5 * 32).view(5, 1, 32) * (source + 1)).expand(5, 2, 32)
            for source in range(2)
        ]
        assert packed[0] == received(rank, ids, words).tolist()
        scales = [weights(source, 5, 1).expand(5, 2) for source in range(2)]
        assert packed[1] == programs.plain(received(rank, ids, scales))


def test_shared_and_special_experts(scenarios):
    alphas = [data(0, (2, 1024), torch.bfloat16, salt=5 + i).double() for i in range(3)]
    for rank, (one, two, special, normalized) in enumerate(scenarios["shared"]):
        x, scales, ids = (
            data(rank, (4, 1024), torch.bfloat16),
            weights(rank, 4, 3),
            routing(rank, 4, 3, 4),
        )
        more = data(rank, (4, 1024), torch.bfloat16, salt=4).double()
        close(one[0], combined(x, ids, scales) + x.double() * SHARED[0] + more, torch.bfloat16)
        close(two[0], combined(x, ids, scales) + x.double() * sum(SHARED) + more, torch.bfloat16)
        if rank < 2:  # With one shared expert each source has its replica; with two each has all.
            assert (one[1], two[1]) == ([8], [16])
        ids = routing(rank, 4, 3, 8)
        expected = combined(x, ids, scales, factors=(*FACTORS[:4], 0.0, 1.0, 0.0, 0.0))
        for token in range(4):
            for k in range(3):
                which = int(ids[token, k]) - 6
                if which >= 0:
                    const = (
                        alphas[0][which] * x[token].double() + alphas[1][which] * alphas[2][which]
                    )
                    expected[token] += const * scales[token, k].double()
        close(special[0], expected, torch.bfloat16)
        y, rstd, total = normalized
        expected = (expected + more).unsqueeze(1) + data(
            rank, (4, 1, 1024), torch.bfloat16, salt=8
        ).double()
        close(total, expected, torch.bfloat16)
        scale = (expected.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        close(rstd, scale, torch.float32, ulps=64)
        close(
            y, expected * scale * data(0, (1024,), torch.bfloat16, salt=9).double(), torch.bfloat16
        )


def test_first_interface(scenarios):
    ids = [routing(rank, 2, 3, 8) for rank in range(8)]
    for rank, (y, places, ends) in enumerate(scenarios["first interface"]):
        close(
            y,
            combined(data(rank, (2, 7168), torch.float16), ids[rank], weights(rank, 2, 3)),
            torch.float16,
        )
        assert ends == torch.tensor([int((each == rank).sum()) for each in ids]).cumsum(0).tolist()
        before = ids[rank][1].unsqueeze(1) == ids[rank][0]
        assert places == [0, 0, 0, *before.any(1).int().tolist()]


UNLIKE = (
    # Without ranks of shared experts: what npu_moe_distribute_combine_v2's page excludes.
    "shared_expert_rank_num is 0; allowed: 1 to 767 (rule moe_distribute_combine_shared.ranks, ",
    "shared_expert_rank_num is 0; allowed: 1 to 767 (rule moe_distribute_combine_shared.ranks, ",
    # npu_moe_distribute_combine_add_rms_norm
    "dimension 0 of gamma is 9 and dimension 1 of expand_x is 1024; ",
    "residual_x is Half (DT_FLOAT16) and expand_x is BFloat16 (DT_BFLOAT16); ",
    "shared_expert_rank_num is 1; allowed: 0 (rule moe_distribute_combine_norm.settings, ",
    "shared_expert_x has 3 dimensions; allowed: 2 ",
    "dimension 1 of expert_ids is 9; allowed: 1 to 8 ",
)


def test_versions_of_an_older_cann(scenarios):
    for equal, message, unlike in scenarios["versions"]:
        assert len(equal) == 5
        assert all(all(each) for each in equal.values()), equal
        assert message[:2] == ["global_bs is 9; it must be a multiple of 2"] * 2
        assert all(text.startswith("comm_quant_mode is 1; 0 is emulated") for text in message[2:4])
        assert message[4].startswith("world_size is 3; the communicator ")
        assert "comm_alg is fullmesh_v1; allowed: , hierarchy" in message[5]
        assert "shared_expert_rank_num is 1; with comm_alg hierarchy, 0 is allowed" in message[6]
        for text, start in zip(unlike, UNLIKE, strict=True):
            assert text.startswith(start)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_products(scenarios, ranks, dtype):
    def values(shape, kind, salt):
        return [data(rank, shape, kind, salt).double() for rank in range(ranks)]

    x1 = [(data(rank, (8, 256), dtype) / 16).double() for rank in range(ranks)]
    x2, bias, x3 = values((256, 48), dtype, 1), values((48,), dtype, 2), values((8, 48), dtype, 3)
    weight = values((256, 48), torch.int8, 4)
    scale, offset = [each / 8 for each in values((48,), dtype, 5)], values((48,), dtype, 6)
    grouped = [each / 8 for each in values((4, 48), dtype, 7)]
    every = range(ranks)
    partial = [x1[i] @ x2[i] for i in every]
    total, whole = sum(partial), torch.cat(x1)
    with_bias = sum(partial[i] + bias[i] for i in every)
    with_offset = sum(x1[i] @ ((weight[i] + offset[i]) * scale[i]) + x3[i] for i in every)
    by_group = sum(x1[i] @ (weight[i] * grouped[i].repeat_interleave(64, 0)) for i in every)
    for rank, answer in enumerate(scenarios[f"matmuls {ranks}"]):
        part, product = total.chunk(ranks)[rank], whole @ x2[rank]
        expected = [
            total,
            with_bias + sum(x3),
            with_bias,
            total,
            product,
            whole,
            part,
            product,
            None,
            part,
            product,
            whole,
            part,
        ]
        expected += [with_offset, by_group]
        for ours, like in zip(answer[str(dtype)], expected, strict=True):
            if like is None:
                assert ours == []
            else:
                close(ours, like, dtype, ulps=16)


@pytest.mark.parametrize("ranks", [2, 4])
def test_products_of_integers(scenarios, ranks):
    def values(shape, kind, salt):
        return [data(rank, shape, kind, salt).double() for rank in range(ranks)]

    x1, x2, bias = (
        values((8, 256), torch.int8, 0),
        values((256, 48), torch.int8, 1),
        values((48,), torch.int32, 2),
    )
    column = [each.abs() / 64 for each in values((48,), torch.float32, 3)]
    half = [each.to(torch.bfloat16).double() for each in column]
    row = [each.abs().view(8, 1) for each in values((8,), torch.float32, 4)]
    every = range(ranks)
    packed = sum((x1[i] @ x2[i] + bias[i]) * column[i] for i in every)
    by_row = sum(x1[i] @ x2[i] * half[i] * row[i] for i in every)
    scattered = sum(x1[i] @ x2[i] * column[i] * row[i] for i in every)
    for rank, answer in enumerate(scenarios[f"matmuls {ranks}"]):
        first, second, third, product, whole, part = answer["int8"]
        close(first, packed, torch.float16, ulps=8)
        close(second, by_row, torch.bfloat16, ulps=8)
        assert third == second
        close(
            product,
            torch.cat(x1) @ x2[rank] * column[rank] * torch.cat(row),
            torch.bfloat16,
            ulps=8,
        )
        assert whole == torch.cat(x1).tolist()
        close(part, scattered.chunk(ranks)[rank], torch.float16, ulps=8)


def test_barrier_waits_for_all(scenarios):
    answers = scenarios["matmuls 4"]
    last = answers[1]["arrived"]
    assert all(answer["left"] >= last for answer in answers)


def test_all_to_all_with_a_product(scenarios):
    for place, (dtype, bias_dtype) in enumerate(
        ((torch.float16, torch.float16), (torch.bfloat16, torch.float32))
    ):
        xs = [data(rank, (6, 16), dtype).double() for rank in range(2)]
        for rank, answer in enumerate(scenarios["all to all"]):
            bias = data(rank, (10,), bias_dtype, salt=3).double()
            left = torch.cat([x.chunk(2)[rank] for x in xs], 1)
            product = left @ data(rank, (32, 10), dtype, salt=1).double()
            parts = [x @ data(i, (16, 10), dtype, salt=2).double() for i, x in enumerate(xs)]
            with_bias = [
                part + data(i, (10,), bias_dtype, salt=3).double() for i, part in enumerate(parts)
            ]
            expected = [product + bias, left, product]
            expected += [
                torch.cat([each.chunk(2, 1)[rank] for each in some]) for some in (with_bias, parts)
            ]
            for ours, like in zip(answer[place], expected, strict=True):
                close(ours, like, dtype, ulps=8)


def test_grouped_products_and_all_to_all(scenarios):
    counts = programs.grouped_counts(8, 2)
    xs = [(data(rank, (1024, 1024), torch.float16) / 32).double() for rank in range(8)]
    weights_of = [data(rank, (2, 1024, 4), torch.float16, salt=1).double() for rank in range(8)]
    # [from][to x expert]
    parts = [x.split(counts[rank].flatten().tolist()) for rank, x in enumerate(xs)]
    # Rows that ranks return, [rank][expert][to]: their rows are by expert, then by the rank that
    # they go to.
    returned = []
    for rank in range(8):
        groups = (
            data(rank, (1024, 8), torch.float16, salt=4)
            .double()
            .split(counts[:, rank].t().flatten().tolist())
        )
        other = data(rank, (2, 8, 1024), torch.float16, salt=5).double()
        returned.append(
            [
                [groups[8 * expert + to] @ other[expert, :, :3] for to in range(8)]
                for expert in range(2)
            ]
        )
    for rank, answer in enumerate(scenarios["grouped"]):
        rows = [
            torch.cat([parts[source][2 * rank + expert] for source in range(8)])
            for expert in range(2)
        ]
        product = torch.cat([rows[expert] @ weights_of[rank][expert] for expert in range(2)])
        shared = (
            data(rank, (3, 16), torch.float16, salt=2).double()
            @ data(rank, (16, 5), torch.float16, salt=3).double()
        )
        y, mm_y, permuted, again = answer[:4]
        close(y, product, torch.float16, ulps=16)
        close(mm_y, shared, torch.float16, ulps=16)
        assert permuted == torch.cat(rows)[:, 0].tolist()
        close(again, product, torch.float16, ulps=16)
        back, mm_y, again = answer[4:]
        sent_back = torch.cat(
            [returned[to][expert][rank] for to in range(8) for expert in range(2)]
        )
        close(back, sent_back, torch.float16, ulps=16)
        close(mm_y, shared, torch.float16, ulps=16)
        close(again, sent_back, torch.float16, ulps=16)


def test_logical_experts_become_physical_ones(scenarios):
    ids, table, scales, by_token, mask, by_rank = scenarios["update"][0]
    for token, row in enumerate(ids):
        for k, expert in enumerate(row):
            number, *places = table[expert]
            assert by_token[token][k] == places[token % number]
            assert by_rank[token][k] == places[3 // -(-4 // number)]
            assert mask[token][k] == (
                token < 3 and scales[token][k] >= sum(scales[token]) * (0.1, 0.3, 0.4)[k]
            )


def test_in_a_graph(scenarios):
    for rank, answers in enumerate(scenarios["graph"]):
        for step, y in enumerate(answers):
            x, ids = (
                data(rank, (3, 32), torch.float16, salt=step),
                routing(rank + 5 * step, 3, 2, 4),
            )
            close(y, combined(x, ids, weights(rank, 3, 2), factors=(2.0,) * 4), torch.float16)


REFUSED = [
    'aclnnMoeDistributeDispatchV4: group_ep is "nobody"; NPU',
    "ep_world_size is 3; the communicator",
    "ep_rank_id is",
    "tp_world_size is 2; allowed: 0, 1",
    "moe_expert_num is 5; it must be a multiple of 2",
    "comm_alg is fullmesh_v1; allowed: , fullmesh, hierarchy",
    "scales has shape [3, 64]; it must be [4, 64]",
    "global_bs is 4; with the 3 tokens of this rank it is at least 6",
    "const_expert_num is 1; allowed: 0",
    "K (the columns of expert_ids) is 17; allowed: 1 to 16",
    "H is 48; it must be a multiple of 32",
    "elastic_info is given; it is reserved",
    "aclnnMoeDistributeDispatch: ep_world_size is 2; allowed: 16, 32, 64",
    (
        "256 tokens of 7168 values, 2 experts each, 4 experts and 2 ranks at least 32 are needed:"
        " set HCCL_BUFFSIZE"
    ),
    "expand_scales is None; on Ascend910B it is needed: what the dispatch returned",
    "reduce_op is max; allowed: sum",
    'aclnnMatmulAllReduce: hcom is "nobody"',
    "dimension 1 of input is 64; allowed: 256 to 65534",
    "ep_world_size, with comm_alg hierarchy, is 2; allowed: 16, 32, 64",
]


@pytest.mark.parametrize(("place", "text"), list(enumerate(REFUSED)))
def test_documented_limits(scenarios, place, text):
    for texts, total in scenarios["refused"]:
        assert text in texts[place]
        assert total == [2.0]


def test_other_operators_on_the_communicator_of_experts(scenarios):
    for dispatch, total, collective in scenarios["shared communicator"]:
        assert "HcclAllReduce on communicator" in collective
        assert (
            "on which MoeDistributeDispatch was called before: MoE dispatch and combine need a"
            " communicator without" in collective
        )
        assert "MoeDistributeDispatch on communicator" in dispatch
        assert "on which HcclAllReduce was called before" in dispatch
        assert total == [4.0]


def test_matrix_product_beside_a_collective_on_vector_cores(scenarios):
    separate, other = scenarios["vector cores"]
    assert (
        "with HCCL_OP_EXPANSION_MODE=AIV collectives of several communicators must not" in separate
    )
    assert "rank 0 failed" in other


@pytest.mark.parametrize(
    ("what", "own_message", "other"),
    [
        (
            "call",
            (
                "rank 1 called HcclAllReduce(4 float32, sum) where this rank called"
                " MoeDistributeDispatch(64 float16)"
            ),
            "rank 0 called",
        ),
        (
            "experts",
            "moe_expert_num is 4 on this rank and 8 on rank 1",
            "moe_expert_num is 8 on this rank and 4 on rank 0",
        ),
        ("range", "rank 1 failed: MoeDistributeDispatch(64 float16)", "; allowed: 0 to 3"),
        ("twice", "the experts of a token must differ", "has 0 twice"),
        ("mask", "all true come first", "all true come first"),
        ("dead", "rank 1 closed its connection: its process ended", None),
        ("late", "nothing from rank 1 in time", "rank 0 failed: MoeDistributeDispatch"),
        ("info", "both must be what the dispatch gave", "both must be what the dispatch gave"),
    ],
)
def test_ranks_that_go_wrong_all_say_so(scenarios, what, own_message, other):
    answers = scenarios[f"wrong {what}"]
    for answer, text in zip(answers, (own_message, other), strict=True):
        if text is None:
            assert answer == "rank 1 ended with status -9, without a result"
            continue
        assert text in answer[0]
        assert answer[1] < 30  # of an HCCL_EXEC_TIMEOUT of 50


def test_operator_failing_before_its_collective_fails_all_ranks(scenarios):
    (first, seconds), (second, _) = scenarios["failed before"]
    assert "which were freed after the call" in second
    assert "rank 1 failed: on communicator" in first
    assert "aclnnMatmulAllReduce: x1, 8388608 bytes" in first
    assert seconds < 30  # of an HCCL_EXEC_TIMEOUT of 40
