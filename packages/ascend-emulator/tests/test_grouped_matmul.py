# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Grouped matmuls, against the formulas of torch_npu's documentation in
float64."""

import pytest
import torch
import torch_npu

HALVES = [torch.float16, torch.bfloat16]


def close(actual, expected, ulps=2):
    bound = ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(
        actual.cpu().double(),
        expected,
        atol=bound * max(1.0, expected.abs().max().item()),
        rtol=bound,
    )


def npu(value):
    return (
        [x.npu() for x in value]
        if isinstance(value, list)
        else value.npu()
        if isinstance(value, torch.Tensor)
        else value
    )


def packed(values):
    """int4 values [..., 8 n] -> int32 [..., n], the first in the lowest bits."""
    fields = (values.long() & 15).unflatten(-1, (-1, 8))
    words = sum(fields[..., i] << (4 * i) for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def integers(*shape, low=-128, high=128):
    return torch.randint(low, high, shape, dtype=torch.int8)


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
        npu(x), npu(weight), bias=npu(bias) if biased else None, split_item=0, group_type=-1
    )
    assert len(actual) == 3
    for i, result in enumerate(actual):
        close(result, x[i].double() @ weight[i].double() + (bias[i].double() if biased else 0))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("split", [2, 3])
def test_grouped_matmul_by_rows(split, kind, stacked):
    counts, x, weight = [2, 0, 5, 1], torch.randn(8, 16).half(), torch.randn(4, 16, 6).half()
    bias = torch.randn(4, 6).half()
    actual = torch_npu.npu_grouped_matmul(
        npu([x]),
        npu([weight] if stacked else list(weight)),
        bias=npu([bias] if stacked else list(bias)),
        group_list=ends_of(counts, kind).npu(),
        split_item=split,
        group_type=0,
        group_list_type=kind,
    )
    expert = torch.arange(4).repeat_interleave(torch.tensor(counts))
    assert len(actual) == 1
    wanted = torch.einsum("mk,mkn->mn", x.double(), weight.double()[expert]) + bias.double()[expert]
    close(actual[0], wanted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("split", [0, 3])
def test_grouped_matmul_of_bfloat16(split, transposed):
    # Few rows are multiplied in place, groups together; many are packed.
    counts = [1, 0, 7, 70, 2, 0, 9, 100]
    x, weight = (
        torch.randn(sum(counts), 136).bfloat16(),
        torch.randn(len(counts), 200, 136).bfloat16(),
    )
    own = weight.npu() if transposed else weight.transpose(1, 2).contiguous().npu().transpose(1, 2)
    if split == 0:  # A list of inputs has an output each.
        parts = [(part, own[i].t()) for i, part in enumerate(x.npu().split(counts)) if len(part)]
        actual = torch.cat(
            torch_npu.npu_grouped_matmul(
                *map(list, zip(*parts, strict=True)), split_item=0, group_type=-1
            )
        )
    else:
        actual = torch_npu.npu_grouped_matmul(
            [x.npu()],
            [own.transpose(1, 2)],
            group_list=ends_of(counts, 1).npu(),
            split_item=split,
            group_type=0,
            group_list_type=1,
        )[0]
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    close(actual, torch.einsum("mk,mnk->mn", x.double(), weight.double()[expert]))


def test_grouped_matmul_of_several_outputs_and_inputs():
    x, weight = torch.randn(7, 8), torch.randn(3, 8, 4)
    parts = torch_npu.npu_grouped_matmul(
        npu([x]), npu(list(weight)), group_list=[2, 3, 7], split_item=1
    )
    split = x.double().split([2, 1, 4])
    for part, rows, matrix in zip(parts, split, weight.double(), strict=True):
        close(part, rows @ matrix)
    whole = torch_npu.npu_grouped_matmul(
        npu(list(x.split([2, 1, 4]))),
        npu(list(weight)),
        split_item=2,
        group_type=0,
        group_list=torch.tensor([2, 3, 7]).npu(),
    )
    close(
        whole[0],
        torch.cat([rows @ matrix for rows, matrix in zip(split, weight.double(), strict=True)]),
    )
    # a list of integers
    same = torch_npu.npu_grouped_matmul(
        npu([x]), npu(list(weight)), group_list=[2, 3, 7], split_item=3
    )
    close(same[0], whole[0].cpu().double())


def test_grouped_matmul_by_columns():
    x, weight = torch.randn(6, 4).half(), torch.randn(6, 5).half()
    actual = torch_npu.npu_grouped_matmul(
        [x.npu().T],
        npu([weight]),
        group_list=torch.tensor([2, 2, 6]).npu(),
        split_item=3,
        group_type=2,
    )
    wide = x.double().T
    expected = [wide[:, a:b] @ weight.double()[a:b] for a, b in ((0, 2), (2, 2), (2, 6))]
    close(actual[0].reshape(3, 4, 5), torch.stack(expected))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_grouped_matmul_of_int8(stacked, dtype):
    counts, x, weight = [3, 1, 4], integers(8, 32), integers(3, 32, 16)
    scale, per_token = (
        (torch.rand(3, 16) * 1e-2).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32),
        torch.rand(8),
    )
    actual = torch_npu.npu_grouped_matmul(
        npu([x]),
        npu([weight] if stacked else list(weight)),
        scale=npu([scale] if stacked else list(scale)),
        per_token_scale=npu([per_token]),
        group_list=ends_of(counts, 1).npu(),
        split_item=3,
        group_type=0,
        group_list_type=1,
        output_dtype=dtype,
    )
    expert = torch.arange(3).repeat_interleave(torch.tensor(counts))
    sums = torch.einsum("mk,mkn->mn", x.double(), weight.double()[expert])
    close(actual[0], sums * scale.double()[expert] * per_token.double()[:, None])
    for kind in (1, 2):
        whole = torch_npu.npu_grouped_matmul(
            npu([x]),
            npu([weight]),
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
    own = packed(weight) if four_bits else weight
    actual = torch_npu.npu_grouped_matmul(
        npu([x]),
        npu([own]),
        antiquant_scale=npu([scale]),
        antiquant_offset=npu([offset]),
        group_list=ends_of(counts, 1).npu(),
        split_item=3,
        group_type=0,
        group_list_type=1,
    )
    expert = torch.tensor([0] * 3 + [1] * 5)
    matrix = (weight.double() + offset.double()[:, None]) * scale.double()[:, None]
    close(actual[0], torch.einsum("mk,mkn->mn", x.double(), matrix[expert]))


def test_grouped_matmul_of_int8_by_int4():
    counts, x, weight = [3, 5], integers(8, 64), integers(2, 64, 16, low=-8, high=8)
    scale = torch.rand(2, 2, 16)  # two groups of 32 rows
    bits = scale.view(torch.int32).long()
    matrix = weight.double() * scale.double().repeat_interleave(32, 1)
    bias, per_token = (8 * matrix.sum(1)).float(), torch.rand(8, 1)
    actual = torch_npu.npu_grouped_matmul(
        npu([x]),
        npu([packed(weight)]),
        scale=npu([bits]),
        bias=npu([bias]),
        per_token_scale=npu([per_token]),
        group_list=ends_of(counts, 1).npu(),
        split_item=3,
        group_type=0,
        group_list_type=1,
        output_dtype=torch.float16,
    )
    expert = torch.tensor([0] * 3 + [1] * 5)
    close(actual[0], torch.einsum("mk,mkn->mn", x.double(), matrix[expert]) * per_token.double())


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
    close(actual, expected, ulps=64)


def test_grouped_matmul_swiglu_quant():
    counts = [2, 4]
    x, weight, scale, per_token = (
        integers(8, 32),
        integers(2, 32, 16),
        torch.rand(2, 16) * 1e-3,
        torch.rand(8),
    )
    values, steps = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        x.npu(), npu([weight]), npu([scale]), per_token.npu(), torch.tensor(counts).cumsum(0).npu()
    )
    expert = torch.tensor([0, 0, 1, 1, 1, 1])
    gate, up = (
        torch.einsum("mk,mkn->mn", x[:6].double(), weight.double()[expert])
        * scale.double()[expert]
        * per_token[:6].double()[:, None]
    ).chunk(2, -1)
    wide = torch.nn.functional.silu(gate) * up
    step = wide.abs().amax(-1) / 127
    close(steps[:6], step, ulps=64)
    assert ((values[:6].cpu().double() - wide / step[:, None]).abs() <= 0.501).all()


def int4(*shape):
    """Values of four bits, and the same packed into int32 words."""
    values = torch.randint(-8, 8, shape, dtype=torch.int8)
    pairs = values.view(torch.uint8)
    return values, ((pairs[..., ::2] & 15) | (pairs[..., 1::2] << 4)).contiguous().view(torch.int32)


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
        npu([scale]),
        per_token.npu(),
        torch.tensor([2, 4]).npu(),
        smooth_scale=smooth.npu(),
        group_list_type=1,
    )
    product = torch.einsum("mk,mkn->mn", x.double(), weight.double()[expert])
    gate, up = (product * scale.double()[expert] * per_token.double()[:, None]).chunk(2, -1)
    wide = torch.nn.functional.silu(gate) * up * smooth.double().view(2, -1)[expert]
    step = wide.abs().amax(-1) / 127
    close(steps, step, ulps=64)
    assert ((values.cpu().double() - wide / step[:, None]).abs() <= 0.501).all()


def grouped(x, weight, **more):
    """One group of rows, or one for each end in `group_list`."""
    options = {"group_list": torch.tensor([4]).npu(), "split_item": 3, "group_type": 0} | more
    stack = weight[None].repeat(len(options["group_list"]), 1, 1)
    return torch_npu.npu_grouped_matmul([x], [stack], **options)


def stacked(x, weight, **more):
    """Two groups of rows."""
    return grouped(x, weight, group_list=torch.tensor([1, 4]).npu(), **more)


@pytest.mark.parametrize(
    ("call", "message"),
    {
        "smooth scale": (
            lambda a, b: torch_npu.npu_grouped_matmul_swiglu_quant_v2(
                a,
                [b[None]],
                [torch.ones(1, 8).npu()],
                torch.ones(4).npu(),
                torch.tensor([4]).npu(),
                smooth_scale=torch.ones(1).npu(),
            ),
            r"smooth_scale is given and x is Char \(DT_INT8\); it belongs to an x of packed int4",
        ),
        "dequant mode": (
            lambda a, b: torch_npu.npu_grouped_matmul_swiglu_quant_v2(
                a,
                [b[None]],
                [torch.ones(1, 8).npu()],
                torch.ones(4).npu(),
                torch.tensor([4]).npu(),
                dequant_mode=1,
            ),
            "dequant_mode is 1; allowed: 0",
        ),
        "columns": (
            lambda a, b: torch_npu.npu_grouped_matmul_swiglu_quant_v2(
                a,
                [torch.ones(1, 8, 10272, dtype=torch.int8).npu()],
                [torch.ones(1, 10272).npu()],
                torch.ones(4).npu(),
                torch.tensor([4]).npu(),
            ),
            "weight has 10272 columns; allowed: up to 10240",
        ),
        "rows": (
            lambda a, b: torch_npu.npu_quant_matmul(
                a, b[:5], b[0, :8].float(), output_dtype=torch.bfloat16
            ),
            "x1 has 8 columns and x2 5 rows",
        ),
        "scale": (
            lambda a, b: torch_npu.npu_quant_matmul(
                a, b, b[0, :3].bfloat16(), output_dtype=torch.bfloat16
            ),
            "scale has shape",
        ),
        "lists": (
            lambda a, b: torch_npu.npu_grouped_matmul(
                [a.half()],
                [b.half()] * 3,
                group_list=torch.tensor([1, 4]).npu(),
                split_item=3,
                group_type=0,
            ),
            "group_list has 2 groups and weight 3",
        ),
        "columns of x": (
            lambda a, b: torch_npu.npu_grouped_matmul([a.half()], [b[:5].half()], group_type=-1),
            "x has 8 columns and weight 0 5 rows",
        ),
        "bias": (
            lambda a, b: torch_npu.npu_grouped_matmul(
                [a.half()], [b.half()], bias=[b[0, :3].half()], group_type=-1
            ),
            r"bias has shape \[3\]; its last dimension must be that of weight 0, 8",
        ),
        "bias of a stack": (
            lambda a, b: stacked(a.half(), b.half(), bias=[b[:1].half()]),
            r"bias has shape \[1, 8\]; its first dimension must be that of weight, 2",
        ),
        "scale of a stack": (
            lambda a, b: stacked(a, b, scale=[b[0].float()], output_dtype=torch.float16),
            r"scale has shape \[8\]; its first dimension must be that of weight, 2",
        ),
        "scales of rows": (
            lambda a, b: stacked(
                a,
                b,
                scale=[b[:2].float()],
                per_token_scale=[a[:3, 0].float()],
                output_dtype=torch.float16,
            ),
            r"per_token_scale has shape \[3\] and x \[4, 8\]; one scale per row is needed",
        ),
        "several x and a stack": (
            lambda a, b: torch_npu.npu_grouped_matmul(
                [a.half()] * 2, [b[None].half()], split_item=3, group_type=0
            ),
            "x has 2 tensors and weight 1",
        ),
        "dtype": (
            lambda a, b: torch_npu.npu_grouped_matmul([a.half()], [b.float()], group_type=-1),
            r"weight is Float \(DT_FLOAT\) and x is? Half \(DT_FLOAT16\)",
        ),
        "dtype of a bias": (
            lambda a, b: grouped(a.bfloat16(), b.bfloat16(), bias=[b[0].bfloat16()]),
            r"bias is BFloat16 \(DT_BFLOAT16\); allowed: Float",
        ),
        "dtype of scales": (
            lambda a, b: grouped(a, b, scale=[b[0].float()], output_dtype=torch.bfloat16),
            r"scale is Float \(DT_FLOAT\); allowed: BFloat16",
        ),
        "dtype of scales of tokens": (
            lambda a, b: grouped(
                a,
                b,
                scale=[b[0].float()],
                per_token_scale=[a[:, 0].half()],
                output_dtype=torch.float16,
            ),
            r"per_token_scale is Half \(DT_FLOAT16\); allowed: Float",
        ),
        "dtype of dequantization": (
            lambda a, b: grouped(
                a.half(), b, antiquant_scale=[b[:1].bfloat16()], antiquant_offset=[b[:1].bfloat16()]
            ),
            r"antiquant_scale is BFloat16 \(DT_BFLOAT16\); allowed: Half",
        ),
        "inner dimension of x": (
            lambda a, b: grouped(a.half().repeat(1, 8192), b.half().repeat(8192, 1)),
            r"x has shape \[4, 65536\], a last dimension of 65536; allowed: below 65536",
        ),
        "inner dimension of the weight": (
            lambda a, b: grouped(a.half(), b.half().repeat(1, 8192)),
            "a last dimension of 65536; allowed: below 65536",
        ),
        "pairs": (
            lambda a, b: grouped(
                a.half(), b.half(), group_list=torch.tensor([[0, 4]]).npu(), group_list_type=2
            ),
            r"x is Half \(DT_FLOAT16\); allowed: Char",
        ),
        "split": (
            lambda a, b: grouped(a.half(), b.half(), split_item=0),
            "split_item is 0; allowed: 2, 3",
        ),
        "wide quantized weight": (
            lambda a, b: torch_npu.npu_quant_matmul(
                a, b.repeat(1, 8192), torch.ones(65536).npu(), output_dtype=torch.bfloat16
            ),
            "the last dimension of x2 is 65536; allowed: 1 to 65535",
        ),
    }.values(),
)
def test_limits_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(
            torch.ones(4, 8, dtype=torch.int8, device="npu"),
            torch.ones(8, 8, dtype=torch.int8, device="npu"),
        )
    assert torch.ones(1).npu().item() == 1  # it was refused at the call


def test_int4_rows_of_the_plain_operator_are_not_emulated():
    """A documented mode, of which the emulator must not say that CANN refuses it."""
    (_, x), (_, weight) = int4(6, 32), int4(1, 32, 32)
    scale = torch.ones(1, 1, 32, dtype=torch.int64, device="npu")
    with pytest.raises(RuntimeError, match="x of int4, eight of which are an int32, is not emul"):
        torch_npu.npu_grouped_matmul(
            [x.npu()],
            [weight.npu()],
            scale=[scale],
            per_token_scale=[torch.ones(6, device="npu")],
            group_list=torch.tensor([6]).npu(),
            group_list_type=0,
            group_type=0,
            split_item=3,
            output_dtype=torch.float16,
        )
