# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Grouped matmuls, against the formulas of torch_npu's documentation in
float64."""

import pytest
import torch
import torch_npu
from comparisons import close_sums, int4, integers, on_npu, packed

HALVES = [torch.float16, torch.bfloat16]


def ends_of(counts, kind):
    """group_list of these counts: cumulated, counts, or pairs."""
    counts = torch.tensor(counts)
    return [counts.cumsum(0), counts, torch.stack([torch.arange(len(counts)), counts], 1)][kind]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_matmul_of_lists(biased, dtype):
    x = [torch.randn(*shape).to(dtype) for shape in ((1, 4, 8), (1, 3, 16), (2, 5, 8))]
    weight = [torch.randn(*shape).to(dtype) for shape in ((8, 6), (16, 4), (8, 10))]
    bias = (
        [
            torch.randn(w.size(1)).to(torch.float32 if dtype == torch.bfloat16 else dtype)
            for w in weight
        ]
        if biased
        else None
    )
    actual = torch_npu.npu_grouped_matmul(
        on_npu(x),
        on_npu(weight),
        bias=on_npu(bias) if biased else None,
        split_item=0,
        group_type=-1,
    )
    assert len(actual) == 3
    for i, result in enumerate(actual):
        close_sums(result, x[i].double() @ weight[i].double() + (bias[i].double() if biased else 0))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("split", [2, 3])
def test_grouped_matmul_by_rows(split, kind, stacked):
    counts, x, weight = [2, 0, 5, 1], torch.randn(8, 16).half(), torch.randn(4, 16, 6).half()
    bias = torch.randn(4, 6).half()
    actual = torch_npu.npu_grouped_matmul(
        on_npu([x]),
        on_npu([weight] if stacked else list(weight)),
        bias=on_npu([bias] if stacked else list(bias)),
        group_list=ends_of(counts, kind).npu(),
        split_item=split,
        group_type=0,
        group_list_type=kind,
    )
    expert = torch.arange(4).repeat_interleave(torch.tensor(counts))
    assert len(actual) == 1
    wanted = torch.einsum("mk,mkn->mn", x.double(), weight.double()[expert]) + bias.double()[expert]
    close_sums(actual[0], wanted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("split", [0, 3])
def test_grouped_matmul_of_bfloat16(split, transposed):
    # Few rows are multiplied in place, groups together; many are packed.
    counts = [1, 0, 7, 70, 2, 0, 9, 100]
    x, weight = (
        torch.randn(sum(counts), 136).bfloat16(),
        torch.randn(len(counts), 200, 136).bfloat16(),
    )
    weight_on_npu = (
        weight.npu() if transposed else weight.transpose(1, 2).contiguous().npu().transpose(1, 2)
    )
    if split == 0:  # A list of inputs has an output each.
        parts = [
            (part, weight_on_npu[i].t())
            for i, part in enumerate(x.npu().split(counts))
            if len(part)
        ]
        actual = torch.cat(
            torch_npu.npu_grouped_matmul(
                *map(list, zip(*parts, strict=True)), split_item=0, group_type=-1
            )
        )
    else:
        actual = torch_npu.npu_grouped_matmul(
            [x.npu()],
            [weight_on_npu.transpose(1, 2)],
            group_list=ends_of(counts, 1).npu(),
            split_item=split,
            group_type=0,
            group_list_type=1,
        )[0]
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    close_sums(actual, torch.einsum("mk,mnk->mn", x.double(), weight.double()[expert]))


def test_grouped_matmul_of_several_outputs_and_inputs():
    x, weight = torch.randn(7, 8), torch.randn(3, 8, 4)
    parts = torch_npu.npu_grouped_matmul(
        on_npu([x]), on_npu(list(weight)), group_list=[2, 3, 7], split_item=1
    )
    split = x.double().split([2, 1, 4])
    for part, rows, matrix in zip(parts, split, weight.double(), strict=True):
        close_sums(part, rows @ matrix)
    whole = torch_npu.npu_grouped_matmul(
        on_npu(list(x.split([2, 1, 4]))),
        on_npu(list(weight)),
        split_item=2,
        group_type=0,
        group_list=torch.tensor([2, 3, 7]).npu(),
    )
    close_sums(
        whole[0],
        torch.cat([rows @ matrix for rows, matrix in zip(split, weight.double(), strict=True)]),
    )
    # a list of integers
    same = torch_npu.npu_grouped_matmul(
        on_npu([x]), on_npu(list(weight)), group_list=[2, 3, 7], split_item=3
    )
    close_sums(same[0], whole[0].cpu().double())


def test_grouped_matmul_by_columns():
    x, weight = torch.randn(6, 4).half(), torch.randn(6, 5).half()
    actual = torch_npu.npu_grouped_matmul(
        [x.npu().T],
        on_npu([weight]),
        group_list=torch.tensor([2, 2, 6]).npu(),
        split_item=3,
        group_type=2,
    )
    wide = x.double().T
    expected = [wide[:, a:b] @ weight.double()[a:b] for a, b in ((0, 2), (2, 2), (2, 6))]
    close_sums(actual[0].reshape(3, 4, 5), torch.stack(expected))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_grouped_matmul_of_int8(stacked, dtype):
    counts, x, weight = [3, 1, 4], integers(8, 32), integers(3, 32, 16)
    scale, per_token = (
        (torch.rand(3, 16) * 1e-2).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32),
        torch.rand(8),
    )
    actual = torch_npu.npu_grouped_matmul(
        on_npu([x]),
        on_npu([weight] if stacked else list(weight)),
        scale=on_npu([scale] if stacked else list(scale)),
        per_token_scale=on_npu([per_token]),
        group_list=ends_of(counts, 1).npu(),
        split_item=3,
        group_type=0,
        group_list_type=1,
        output_dtype=dtype,
    )
    expert = torch.arange(3).repeat_interleave(torch.tensor(counts))
    sums = torch.einsum("mk,mkn->mn", x.double(), weight.double()[expert])
    close_sums(actual[0], sums * scale.double()[expert] * per_token.double()[:, None])
    for kind in (1, 2):
        whole = torch_npu.npu_grouped_matmul(
            on_npu([x]),
            on_npu([weight]),
            group_list=ends_of(counts, kind).npu(),
            split_item=3,
            group_type=0,
            group_list_type=kind,
            output_dtype=torch.int32,
        )
        assert torch.equal(whole[0].cpu().double(), sums)


@pytest.mark.parametrize("four_bits", [False, True])
def test_grouped_matmul_with_dequantized_weights(four_bits):
    counts, x, weight = [3, 5], torch.randn(8, 32).half(), integers(2, 32, 16, low=-8, high=8)
    scale, offset = torch.rand(2, 16).half(), torch.randn(2, 16).half()
    stored = packed(weight) if four_bits else weight
    actual = torch_npu.npu_grouped_matmul(
        on_npu([x]),
        on_npu([stored]),
        antiquant_scale=on_npu([scale]),
        antiquant_offset=on_npu([offset]),
        group_list=ends_of(counts, 1).npu(),
        split_item=3,
        group_type=0,
        group_list_type=1,
    )
    expert = torch.tensor([0] * 3 + [1] * 5)
    matrix = (weight.double() + offset.double()[:, None]) * scale.double()[:, None]
    close_sums(actual[0], torch.einsum("mk,mkn->mn", x.double(), matrix[expert]))


def test_grouped_matmul_of_int8_by_int4():
    counts, x, weight = [3, 5], integers(8, 64), integers(2, 64, 16, low=-8, high=8)
    scale = torch.rand(2, 2, 16)  # two groups of 32 rows
    bits = scale.view(torch.int32).long()
    matrix = weight.double() * scale.double().repeat_interleave(32, 1)
    bias, per_token = (8 * matrix.sum(1)).float(), torch.rand(8, 1)
    actual = torch_npu.npu_grouped_matmul(
        on_npu([x]),
        on_npu([packed(weight)]),
        scale=on_npu([bits]),
        bias=on_npu([bias]),
        per_token_scale=on_npu([per_token]),
        group_list=ends_of(counts, 1).npu(),
        split_item=3,
        group_type=0,
        group_list_type=1,
        output_dtype=torch.float16,
    )
    expert = torch.tensor([0] * 3 + [1] * 5)
    close_sums(
        actual[0], torch.einsum("mk,mkn->mn", x.double(), matrix[expert]) * per_token.double()
    )


def test_finalize_routing():
    counts, k = [2, 1, 5], 2
    x, weight, scale, per_token, logit = (
        integers(8, 32),
        integers(3, 32, 256),
        torch.rand(3, 256) * 1e-2,
        torch.rand(8),
        torch.rand(8),
    )
    shared, rows = torch.randn(2, 256).bfloat16(), torch.randperm(8) // k
    actual = torch_npu.npu_grouped_matmul_finalize_routing(
        x.npu(),
        weight.npu(),
        torch.tensor(counts).npu(),
        scale=scale.npu(),
        pertoken_scale=per_token.npu(),
        shared_input=shared.npu(),
        logit=logit.npu(),
        row_index=rows.npu(),
        dtype=torch.float32,
        shared_input_weight=0.5,
        shared_input_offset=1,
        output_bs=4,
        group_list_type=1,
    )
    expert = torch.arange(3).repeat_interleave(torch.tensor(counts))
    values = (
        torch.einsum("mk,mkn->mn", x.double(), weight.double()[expert])
        * scale.double()[expert]
        * (per_token * logit).double()[:, None]
    )
    expected = torch.zeros(4, 256, dtype=torch.float64).index_add(0, rows, values)
    expected[1:3] += 0.5 * shared.double()
    close_sums(actual, expected, ulps=64)


def test_grouped_matmul_swiglu_quant():
    counts = [2, 4]
    x, weight, scale, per_token = (
        integers(8, 32),
        integers(2, 32, 16),
        torch.rand(2, 16) * 1e-3,
        torch.rand(8),
    )
    values, steps = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        x.npu(),
        on_npu([weight]),
        on_npu([scale]),
        per_token.npu(),
        torch.tensor(counts).cumsum(0).npu(),
    )
    expert = torch.tensor([0, 0, 1, 1, 1, 1])
    gate, up = (
        torch.einsum("mk,mkn->mn", x[:6].double(), weight.double()[expert])
        * scale.double()[expert]
        * per_token[:6].double()[:, None]
    ).chunk(2, -1)
    wide = torch.nn.functional.silu(gate) * up
    step = wide.abs().amax(-1) / 127
    close_sums(steps[:6], step, ulps=64)
    assert ((values[:6].cpu().double() - wide / step[:, None]).abs() <= 0.501).all()


@pytest.mark.parametrize("smooth", [torch.rand(2), torch.rand(2, 16)], ids=["experts", "columns"])
def test_grouped_matmul_swiglu_quant_of_int4(smooth):
    (x, x_words), (weight, weight_words) = int4(6, 32), int4(2, 32, 32)
    scale, per_token, expert = (
        torch.rand(2, 32) * 1e-2,
        torch.rand(6),
        torch.tensor([0, 0, 1, 1, 1, 1]),
    )
    values, steps = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        x_words.npu(),
        [weight_words.npu()],
        on_npu([scale]),
        per_token.npu(),
        torch.tensor([2, 4]).npu(),
        smooth_scale=smooth.npu(),
        group_list_type=1,
    )
    product = torch.einsum("mk,mkn->mn", x.double(), weight.double()[expert])
    gate, up = (product * scale.double()[expert] * per_token.double()[:, None]).chunk(2, -1)
    wide = torch.nn.functional.silu(gate) * up * smooth.double().view(2, -1)[expert]
    step = wide.abs().amax(-1) / 127
    close_sums(steps, step, ulps=64)
    assert ((values.cpu().double() - wide / step[:, None]).abs() <= 0.501).all()
