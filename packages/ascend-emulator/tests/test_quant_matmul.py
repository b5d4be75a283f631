# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantized matmuls, against the formulas of torch_npu's documentation in float64."""

import pytest
import torch
import torch_npu
from comparisons import close_sums, integers, packed

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("transposed", [False, True])
def test_quant_matmul_per_token(transposed, batch, dtype):
    a, b = integers(*batch, 5, 64), integers(*batch, 64, 16)
    scale, per_token, bias = (
        torch.rand(16) * 1e-2,
        torch.rand(5),
        torch.randint(-500, 500, (16,), dtype=torch.int32),
    )
    right = b.transpose(-1, -2).contiguous().npu().transpose(-1, -2) if transposed else b.npu()
    actual = torch_npu.npu_quant_matmul(
        a.npu(),
        right,
        scale.npu(),
        pertoken_scale=per_token.npu(),
        bias=bias.npu(),
        output_dtype=dtype,
    )
    close_sums(
        actual, (a.double() @ b.double() + bias) * scale.double() * per_token.double()[:, None]
    )


def test_quant_matmul_to_int8_and_int32():
    a, b, scale, offset = integers(4, 32), integers(32, 8), torch.rand(8) * 1e-2, torch.randn(8)
    actual = torch_npu.npu_quant_matmul(a.npu(), b.npu(), scale.npu(), offset=offset.npu())
    # 19 bits of it reach the cube unit.
    short = (scale.view(torch.int32) & ~0x1FFF).view(torch.float32)
    wide = (a.double() @ b.double()) * short.double() + offset.double()
    assert ((actual.cpu().double() - wide.clamp(-128, 127)).abs() <= 0.501).all()
    whole = torch_npu.npu_quant_matmul(a.npu(), b.npu(), scale.npu(), output_dtype=torch.int32)
    assert torch.equal(whole.cpu().long(), a.long() @ b.long())


def test_quant_matmul_sums_beyond_float32_are_exact():
    """127 x 127 x 2501 is odd and above 2^25."""
    a, b = torch.full((3, 2501), 127, dtype=torch.int8), integers(2501, 8)
    b[:, 0] = 127
    scale = torch.ones(8)
    result = torch_npu.npu_quant_matmul(a.npu(), b.npu(), scale.npu(), output_dtype=torch.int32)
    assert torch.equal(result.cpu().long(), a.long() @ b.long())


@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float32], ids=str)
def test_quant_matmul_to_bfloat16_adds_its_bias_last(bias):
    a, b, scale, add = (
        integers(4, 32),
        integers(32, 8),
        (torch.rand(8) * 1e-2).bfloat16(),
        torch.randn(8).to(bias),
    )
    actual = torch_npu.npu_quant_matmul(
        a.npu(), b.npu(), scale.npu(), bias=add.npu(), output_dtype=torch.bfloat16
    )
    close_sums(actual, a.double() @ b.double() * scale.double() + add.double())


@pytest.mark.parametrize("transposed", [False, True])
def test_quant_matmul_of_int4(transposed):
    a, b, scale = (
        integers(4, 64, low=-8, high=8),
        integers(64, 16, low=-8, high=8),
        torch.rand(16) * 1e-2,
    )
    right = packed(b.T).contiguous().npu().T if transposed else packed(b).npu()
    actual = torch_npu.npu_quant_matmul(
        packed(a).npu(),
        right,
        scale.npu(),
        pertoken_scale=torch.ones(4).npu(),
        output_dtype=torch.float16,
    )
    close_sums(actual, a.double() @ b.double() * scale.double())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("precise", [0, 1])
def test_weight_quant_batchmatmul(precise, four_bits, group, dtype):
    x, weight = torch.randn(3, 64).to(dtype), integers(64, 16, low=-8, high=8)
    rows = 2 if group else 1
    scale, offset, bias = (
        torch.rand(rows, 16).to(dtype),
        torch.randn(rows, 16).to(dtype),
        torch.randn(16).to(torch.float32 if dtype == torch.bfloat16 else dtype),
    )
    stored = packed(weight) if four_bits else weight
    actual = torch_npu.npu_weight_quant_batchmatmul(
        x.npu(),
        stored.npu(),
        scale.npu(),
        offset.npu(),
        bias=bias.npu(),
        antiquant_group_size=group,
        inner_precise=precise,
    )
    spread = lambda p: p.double().repeat_interleave(64 // rows, 0)  # noqa: E731
    close_sums(
        actual, x.double() @ ((weight.double() + spread(offset)) * spread(scale)) + bias.double()
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"antiquant_group_size": 64}, "antiquant_group_size"),
        ({"antiquant_group_size": 16}, "antiquant_group_size"),
        ({"bias": torch.randn(16)}, "bias is .*; allowed: "),
    ],
    ids=["one group", "small groups", "float32 bias"],
)
def test_weight_quant_limits(changed, message):
    x, weight = torch.randn(3, 64).half().npu(), integers(64, 16, low=-8, high=8).npu()
    groups = 64 // changed.get("antiquant_group_size", 64)
    scale = torch.rand(groups, 16).half().npu()
    changed = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in changed.items()}
    with pytest.raises(RuntimeError, match=message):
        torch_npu.npu_weight_quant_batchmatmul(x, weight, scale, **changed)


def test_int4_weight_packed_by_torch_npu():
    x, weight = torch.randn(3, 64).half(), torch.randint(-8, 8, (64, 32), dtype=torch.int32)
    words = torch_npu.npu_convert_weight_to_int4pack(weight.npu())
    assert torch.equal(words.cpu(), packed(weight))
    scale = torch.rand(1, 32).half()
    close_sums(
        torch_npu.npu_weight_quant_batchmatmul(x.npu(), words, scale.npu()),
        x.double() @ (weight.double() * scale.double()),
    )


@pytest.mark.parametrize("with_a", [True, False])
def test_batch_gather_matmul(with_a):
    y, x = torch.randn(5, 48).half(), torch.randn(5, 64 if with_a else 16).half()
    a, b = torch.randn(3, 2, 16, 64).half(), torch.randn(3, 2, 32, 16).half()
    indices = torch.tensor([0, 2, 1, 3, 2], dtype=torch.int32)  # 3: without an adapter
    actual = torch_npu.npu_batch_gather_matmul_(
        y.npu(),
        x.npu(),
        b.npu(),
        indices.npu(),
        a.npu() if with_a else None,
        layer_idx=1,
        scale=0.5,
        y_offset=8,
        y_slice_size=32,
    )
    expected = y.double()
    for i, index in enumerate(indices.tolist()):
        if index < 3:
            low = a[index, 1].double() @ x[i].double() if with_a else x[i].double()
            expected[i, 8:40] += 0.5 * (b[index, 1].double() @ low)
    close_sums(actual, expected, ulps=4)
