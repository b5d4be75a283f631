# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantization, against the formulas of torch_npu's documentation in float64."""

import pytest
import torch
import torch_npu
from cann_calls import Calls
from comparisons import close_numbers, packed, same_integers, unpacked

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, *HALVES]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("kind", "lowest", "highest"),
    [(torch.qint8, -128, 127), (torch.quint8, 0, 255), (torch.qint32, -(2**31), 2**31 - 1)],
    ids=str,
)
def test_quantize_by_division(kind, lowest, highest, dtype):
    x, scales, zeros = (
        torch.randn(4, 5, 6).to(dtype),
        torch.rand(5) * 0.02 + 0.01,
        torch.randint(-3, 4, (5,), dtype=torch.int32),
    )
    actual = torch_npu.npu_quantize(x.npu(), scales.npu(), zeros.npu(), kind, 1)
    same_integers(actual, x.double() / scales.double()[:, None] + zeros[:, None], lowest, highest)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((16,), -1), ((1,), -1), ((5, 1), -2)])
def test_quantize_by_multiplication(shape, axis, dtype):
    x, scales, zeros = (
        torch.randn(5, 16).to(dtype),
        (torch.rand(shape) * 60).to(dtype),
        torch.randn(shape).to(dtype),
    )
    wide = x.double() * scales.double() + zeros.double()
    actual = torch_npu.npu_quantize(x.npu(), scales.npu(), zeros.npu(), torch.qint8, axis, False)
    assert actual.dtype == torch.int8
    same_integers(actual, wide, -128, 127)
    words = torch_npu.npu_quantize(
        x.npu(), (scales / 10).npu(), zeros.npu(), torch.quint4x2, axis, False
    )
    assert words.dtype == torch.int32
    same_integers(unpacked(words), x.double() * (scales / 10).double() + zeros.double(), -8, 7)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("smooth", [None, "one", "groups"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dynamic_quant(symmetric, smooth, four_bits, dtype):
    x = torch.randn(3, 4, 32).to(dtype)
    scales, ends, wide = None, None, x.double()
    if smooth == "one":
        scales = torch.rand(32).to(dtype) + 0.5
        wide = wide * scales.double()
    elif smooth == "groups":
        scales, ends = (
            torch.rand(3, 32).to(dtype) + 0.5,
            torch.tensor([2, 2, 12], dtype=torch.int32),
        )
        wide = (wide.view(12, 32) * scales.double()[torch.tensor([0] * 2 + [2] * 10)]).view(x.shape)
    top = 7 if four_bits else 127
    options = {
        "smooth_scales": None if scales is None else scales.npu(),
        "group_index": None if ends is None else ends.npu(),
    }
    options["dst_type"] = torch.quint4x2 if four_bits else torch.int8
    if symmetric:
        values, scale = torch_npu.npu_dynamic_quant(x.npu(), **options)
        step = wide.abs().amax(-1) / top
        expected = wide / step[..., None]
    else:
        values, scale, offset = torch_npu.npu_dynamic_quant_asymmetric(x.npu(), **options)
        step = (wide.amax(-1) - wide.amin(-1)) / (2 * top + 1)
        close_numbers(offset, top - wide.amax(-1) / step, 1e-4)
        expected = wide / step[..., None] + (top - wide.amax(-1) / step)[..., None]
    close_numbers(scale, step)
    same_integers(unpacked(values) if four_bits else values, expected, -top - 1, top)


def test_dynamic_quant_of_zeros():
    values, scale = torch_npu.npu_dynamic_quant(
        torch.zeros(2, 8, dtype=torch.float16, device="npu")
    )
    assert not values.any()
    assert not scale.any()


def test_asymmetric_quantization_of_one_value():
    """By the documented formula, which divides by a scale of 0."""
    values, scale, offset = torch_npu.npu_dynamic_quant_asymmetric(
        torch.ones(2, 8, dtype=torch.float16, device="npu")
    )
    assert not values.any()
    assert not scale.any()
    assert not offset.isfinite().any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("four_bits", [False, True])
def test_anti_quant(four_bits, dtype):
    integers = torch.randint(-8, 8, (3, 16)) if four_bits else torch.randint(-128, 128, (3, 16))
    x = packed(integers) if four_bits else integers.to(torch.int8)
    scale, offset = torch.randn(16), torch.randn(16)
    actual = torch_npu.npu_anti_quant(x.npu(), scale.npu(), offset=offset.npu(), dst_dtype=dtype)
    bound = torch.finfo(dtype).eps
    torch.testing.assert_close(
        actual.cpu().double(), (integers + offset.double()) * scale.double(), atol=bound, rtol=bound
    )


def test_trans_quant_param():
    scale, offset = torch.tensor([1.0 + 2**-9 + 2**-12, -3.7]), torch.tensor([3.4, -300.0])
    bits = torch_npu.npu_trans_quant_param(scale.npu(), offset.npu()).cpu()
    assert (
        (bits & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
        == (scale.view(torch.int32) & ~0x1FFF).view(torch.float32)
    ).all()
    assert (bits >> 46 == 1).all()
    assert ((bits >> 37) & 0x1FF).tolist() == [3, 256]  # nine bits, saturated at -256
    rounded = torch_npu.npu_trans_quant_param(
        torch.tensor([1.0 + 2**-11 * 1.5]).npu(), round_mode=1
    ).cpu()
    assert (rounded & 0xFFFFFFFF).to(torch.int32).view(torch.float32).item() == 1.0 + 2**-10


@pytest.mark.parametrize("offset", [None, -0.3])
def test_group_quant(offset):
    x, scale, ends = torch.randn(6, 16), torch.rand(3, 16) * 40, torch.tensor([1, 1, 6])
    shift = None if offset is None else torch.tensor([offset]).npu()
    actual = torch_npu.npu_group_quant(
        x.npu(), scale.npu(), ends.npu(), offset=shift, dst_dtype=torch.qint8
    )
    same_integers(
        actual, x.double() * scale.double()[torch.tensor([0] + [2] * 5)] + (offset or 0), -128, 127
    )


@pytest.mark.parametrize("two_dimensions", [False, True])
def test_quant_scatter(two_dimensions):
    cache = torch.randint(-128, 128, (4, 6, 32), dtype=torch.int8)
    updates, scales = torch.randn(2, 2, 32).to(torch.bfloat16), torch.rand(32) * 0.02 + 0.01
    indices = torch.tensor([[3, 1], [0, 4]] if two_dimensions else [2, 3], dtype=torch.int32)
    actual = torch_npu.npu_quant_scatter(
        cache.npu(),
        indices.npu(),
        updates.npu(),
        scales.npu(),
        None,
        axis=-2,
        quant_axis=-1,
        reduce="update",
    )
    expected = cache.double()
    for i, (batch, start) in enumerate(
        indices.tolist() if two_dimensions else enumerate(indices.tolist())
    ):
        expected[batch, start : start + 2] = updates[i].double() / scales.double()
    same_integers(actual, expected, -128, 127)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("clip", [1.0, 0.75])
def test_kronecker_quant(clip, dtype):
    x, left, right = (
        torch.randn(5, 3, 16).to(dtype),
        torch.randn(3, 3).to(dtype),
        torch.randn(16, 16).to(dtype),
    )
    words, scale = torch_npu.npu_kronecker_quant(x.npu(), left.npu(), right.npu(), clip)
    wide = left.double() @ x.double() @ right.double()
    step = wide.abs().amax((1, 2)) / (7 / clip)
    close_numbers(scale, step)
    same_integers(unpacked(words), wide / step.view(-1, 1, 1), -8, 7)


@pytest.mark.parametrize(
    ("call", "message"),
    {
        "int4 columns": (
            lambda x: torch_npu.npu_dynamic_quant(x.float()),
            r"aclnnDynamicQuantV2: x is Float \(DT_FLOAT\); allowed: Half, BFloat16",
        ),
        "smooth": (
            lambda x: torch_npu.npu_dynamic_quant(x, smooth_scales=x[0, :4]),
            r"the last dimension of smooth_scales is 4 .* \(rule dynamic_quant.smooth-size, documented",
        ),
        "scales": (
            lambda x: torch_npu.npu_quantize(x, x[0, :3], None, torch.qint8, -1, False),
            "scales has 3 elements; allowed: 1, or 16",
        ),
        "zero_points": (
            lambda x: torch_npu.npu_quantize(x, x[0].float(), x[0, :3].int(), torch.qint8, 1),
            "zero_points has 3 elements; allowed: 1, or 16",
        ),
        "clip": (
            lambda x: torch_npu.npu_kronecker_quant(x[None], x[:, :4].contiguous(), x.T @ x, 1.5),
            "clip_ratio is 1.5",
        ),
    }.values(),
)
def test_limits_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.randn(4, 16, dtype=torch.float16, device="npu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fake_quantization(dtype):
    """By name: torch_npu of this version computes it on the host."""
    calls, range_ = Calls(), (-20, 19)
    x, scale, zero = (
        (3 * torch.randn(4, 6)).to(dtype),
        torch.rand(4) / 10 + 0.01,
        torch.randint(-5, 5, (4,), dtype=torch.int32),
    )
    given, one = (x.npu(), scale.npu(), zero.npu()), (x.npu(), scale[:1].npu(), zero[:1].npu())
    outs = x.npu(), torch.zeros(4, 6, dtype=torch.bool).npu()
    calls.compute("FakeQuantPerChannelAffineCachemask", *given, 0, *range_, *outs)
    expected, kept = torch.ops.aten.fake_quantize_per_channel_affine_cachemask(
        x.float(), scale, zero, 0, *range_
    )
    assert torch.equal(outs[0].cpu(), expected.to(dtype))
    assert torch.equal(outs[1].cpu(), kept)
    for enabled in (0, 1):
        calls.compute("FakeQuantPerTensorAffineCachemask", *one, enabled, *range_, *outs)
        expected, kept = torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
            x.float(), scale[:1], zero[:1], torch.tensor([enabled]), *range_
        )
        assert torch.equal(outs[0].cpu(), expected.to(dtype))
        assert torch.equal(outs[1].cpu(), kept)
    message = calls.refusal("FakeQuantPerTensorAffineCachemask", *one, 1, 3, 3, *outs)
    assert message == "quant_min is 3 and quant_max 3; it must be smaller"
    message = calls.refusal("FakeQuantPerChannelAffineCachemask", *given, 1, *range_, *outs)
    assert message == "scale has shape [4]; it must be [6]"
