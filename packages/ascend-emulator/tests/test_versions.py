# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Versions of operators that the installed torch_npu does not call, against CPU torch in float64 or
the version that it calls."""

import pytest
import torch
import torch_npu
from torch.nn import functional

FLOATS = [torch.float32, torch.float16]


def npu(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, device="npu")


def near(actual, expected, ulps=4):
    bound = ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.cpu().double(), expected.double(), rtol=bound, atol=bound)


SHAPES = [(3, 4), (5,)]
PAIRS = {"Add": torch.add, "Sub": torch.sub}
NUMBERS = PAIRS | {
    "Mul": torch.mul,
    "Div": torch.div,
    "Pow": torch.pow,
    "Maximum": lambda x, number: x.clamp_min(number),
    "Minimum": lambda x, number: x.clamp_max(number),
}


def lists(dtype, count):
    return [[torch.rand(shape).to(dtype) + 0.25 for shape in SHAPES] for _ in range(count)]


def on_npu(tensors):
    return [each.npu() for each in tensors]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_foreach_with_a_number_in_a_tensor(calls, name, dtype):
    (xs,) = lists(dtype, 1)
    number, outs = torch.tensor([0.75]).to(dtype), [npu(shape, dtype=dtype) for shape in SHAPES]
    calls.compute(f"Foreach{name}Scalar", on_npu(xs), number.npu(), outs)
    for x, out in zip(xs, outs, strict=True):
        near(out, NUMBERS[name](x.double(), 0.75))
    message = calls.refusal(f"Foreach{name}Scalar", on_npu(xs), npu(2, dtype=dtype), outs)
    assert message == "scalar has shape [2]; it must have one element"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_foreach_of_two_lists(calls, name, dtype):
    xs, ys = lists(dtype, 2)
    alpha, outs = torch.tensor([-0.5]).to(dtype), [npu(shape, dtype=dtype) for shape in SHAPES]
    calls.compute(f"Foreach{name}List", on_npu(xs), on_npu(ys), alpha.npu(), outs)
    for x, y, out in zip(xs, ys, outs, strict=True):
        near(out, PAIRS[name](x.double(), y.double(), alpha=-0.5))
    message = calls.refusal(f"Foreach{name}List", on_npu(xs), on_npu(ys), npu(2, dtype=dtype), outs)
    assert message == "alpha has shape [2]; it must have one element"


@pytest.mark.parametrize("name", ["Addcmul", "Addcdiv"])
def test_foreach_of_three_lists(calls, name):
    xs, ys, zs = lists(torch.float32, 3)
    outs = [npu(shape) for shape in SHAPES]
    calls.compute(
        f"Foreach{name}Scalar", on_npu(xs), on_npu(ys), on_npu(zs), torch.tensor([2.0]).npu(), outs
    )
    for x, y, z, out in zip(xs, ys, zs, outs, strict=True):
        near(out, getattr(torch, name.lower())(x.double(), y.double(), z.double(), value=2.0))
    assert "scalar has shape [2]" in calls.refusal(
        f"Foreach{name}Scalar", on_npu(xs), on_npu(ys), on_npu(zs), npu(2), outs
    )


@pytest.mark.parametrize(
    ("mode", "function"),
    {1: torch.round, 2: torch.floor, 3: torch.ceil, 5: torch.trunc, 7: torch.frac}.items(),
)
def test_foreach_rounding(calls, mode, function):
    xs = [4 * torch.randn(shape) for shape in SHAPES]
    outs = [npu(shape) for shape in SHAPES]
    calls.compute(
        "ForeachRoundOffNumber", on_npu(xs), torch.tensor([mode], dtype=torch.int8).npu(), outs
    )
    for x, out in zip(xs, outs, strict=True):
        near(out, function(x.double()))
    assert "roundMode has shape [2]" in calls.refusal(
        "ForeachRoundOffNumber", on_npu(xs), npu(2, dtype=torch.int8), outs
    )


def test_topk(calls):
    x, values, indices = torch.randn(4, 6), npu(4, 2), npu(4, 2, dtype=torch.int64)
    calls.compute("Topk", x.npu(), 2, -1, False, True, values, indices)
    expected = x.topk(2, largest=False)
    assert torch.equal(values.cpu(), expected.values)
    assert torch.equal(indices.cpu(), expected.indices)
    assert (
        calls.refusal("Topk", x.npu(), 7, -1, True, True, values, indices)
        == "k is 7; allowed: 0 to 6"
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_upsampling(calls, dtype):
    line, image = torch.randn(2, 3, 5).to(dtype), torch.randn(2, 3, 4, 5).to(dtype)
    out = npu(2, 3, 8, dtype=dtype)
    calls.compute("UpsampleNearest1d", line.npu(), [8], out)
    near(out, functional.interpolate(line.double(), size=8, mode="nearest"))
    out = npu(2, 3, 7, 9, dtype=dtype)
    calls.compute("UpsampleNearest2d", image.npu(), [7, 9], out)
    near(out, functional.interpolate(image.double(), size=(7, 9), mode="nearest"))
    grad, inner = torch.randn(2, 3, 7, 9).to(dtype), npu(2, 3, 4, 5, dtype=dtype)
    calls.compute(
        "UpsampleBilinear2dBackward", grad.npu(), [7, 9], [2, 3, 4, 5], True, 0.0, 0.0, inner
    )
    near(
        inner,
        torch.ops.aten.upsample_bilinear2d_backward(grad.double(), [7, 9], [2, 3, 4, 5], True),
        ulps=16,
    )
    assert calls.workspace("UpsampleNearest1d", line.npu(), [8], npu(2, 3, 7, dtype=dtype))[0] != 0
    assert calls.workspace("UpsampleNearest2d", line.npu(), [7, 9], out)[0] != 0
    assert (
        calls.workspace(
            "UpsampleBilinear2dBackward", grad.npu(), [7, 8], [2, 3, 4, 5], True, 0.0, 0.0, inner
        )[0]
        != 0
    )


def test_hardswish_backward(calls):
    grad, x, out = torch.randn(40), torch.linspace(-4, 4, 40), npu(40)
    calls.compute("HardswishBackward", grad.npu(), x.npu(), out)
    near(out, torch.ops.aten.hardswish_backward(grad.double(), x.double()))
    assert calls.workspace("HardswishBackward", grad.npu(), npu(39), out)[0] != 0


@pytest.mark.parametrize("mode", [0, 1], ids=["half", "interleave"])
def test_rotary_embedding(calls, mode):
    x, angles = torch.randn(2, 5, 3, 16).half(), torch.randn(1, 5, 1, 16)
    cos, sin = angles.cos().half(), angles.sin().half()
    out = npu(2, 5, 3, 16, dtype=torch.half)
    calls.compute("RotaryPositionEmbedding", x.npu(), cos.npu(), sin.npu(), mode, out)
    assert torch.equal(
        out,
        torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), "interleave" if mode else "half"),
    )
    assert "rotary_mode is 2; allowed: 0, 1" in calls.refusal(
        "RotaryPositionEmbedding", x.npu(), cos.npu(), sin.npu(), 2, out
    )


def test_rotary_embedding_in_place(calls):
    query, key = torch.randn(1, 4, 2, 64).half().npu(), torch.randn(1, 4, 1, 64).half().npu()
    angles = torch.randn(1, 4, 1, 64)
    cos, sin = angles.cos().half().npu(), angles.sin().half().npu()
    expected = torch_npu.npu_apply_rotary_pos_emb(query.clone(), key.clone(), cos, sin, "BSND")
    calls.compute("ApplyRotaryPosEmb", query, key, cos, sin, 1)
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])
    assert "layout is 2; allowed: 1, 4" in calls.refusal(
        "ApplyRotaryPosEmb", query, key, cos, sin, 2
    )


def test_rotary_embedding_of_positions(calls):
    positions, cache = torch.tensor([3, 0, 7]), torch.randn(8, 64).half()
    query, key = torch.randn(3, 128).half(), torch.randn(3, 64).half()
    outs = npu(3, 128, dtype=torch.half), npu(3, 64, dtype=torch.half)
    given = (positions.npu(), query.npu(), key.npu(), cache.npu())
    calls.compute("RopeWithSinCosCache", *given, [0, 0, 0], 64, True, *outs)
    expected = torch_npu.npu_mrope(*given, 64, mrope_section=[0, 0, 0], rotary_mode="half")
    assert all(torch.equal(*pair) for pair in zip(outs, expected, strict=True))
    assert "head_size is 48" in calls.refusal(
        "RopeWithSinCosCache", *given, [0, 0, 0], 48, True, *outs
    )


def test_quantization(calls):
    x, scale = torch.randn(4, 64).half().npu(), (20 * torch.rand(64) + 1).half().npu()
    out = npu(4, 64, dtype=torch.int8)
    calls.compute("AscendQuant", x, scale, None, False, "round", 2, out)
    assert torch.equal(out, torch_npu.npu_quantize(x, scale, None, torch.qint8, -1, False))
    assert "round_mode is floor; allowed: round" in calls.refusal(
        "AscendQuant", x, scale, None, False, "floor", 2, out
    )
    rows = npu(4)
    calls.compute("DynamicQuant", x, None, out, rows)
    expected = torch_npu.npu_dynamic_quant(x)
    assert torch.equal(out, expected[0])
    assert torch.equal(rows, expected[1])
    assert (
        calls.refusal("DynamicQuant", x.float(), None, out, rows)
        == "x is Float (DT_FLOAT); allowed: Half, BFloat16"
        " (rule dynamic_quant.x-dtype, documented: torch_npu 2.13)"
    )


def test_quantization_parameters(calls):
    scale, offset, out = torch.randn(8).npu(), torch.randn(8).npu(), npu(8, dtype=torch.int64)
    calls.compute("TransQuantParamV2", scale, offset, out)
    assert torch.equal(out, torch_npu.npu_trans_quant_param(scale, offset))
    assert (
        calls.refusal("TransQuantParamV2", scale.half(), offset, out)
        == "scale is Half (DT_FLOAT16); allowed: Float"
        " (rule trans_quant_param.dtypes, documented: torch_npu 2.13)"
    )


def test_flat_quantization(calls):
    x, left, right = (torch.randn(shape).half().npu() for shape in ((2, 4, 16), (4, 4), (16, 16)))
    out, scale = npu(2, 4, 2, dtype=torch.int32), npu(2)
    calls.compute("FlatQuant", x, left, right, 0.9, out, scale)
    expected = torch_npu.npu_kronecker_quant(x, left, right, 0.9)
    assert torch.equal(out, expected[0])
    assert torch.equal(scale, expected[1])
    assert "clip_ratio is 2; allowed: above 0, up to 1" in calls.refusal(
        "FlatQuant", x, left, right, 2.0, out, scale
    )


def test_add_rms_norm_and_quantization(calls):
    a, b, gamma, scale = (
        torch.rand(shape).half().npu() for shape in ((3, 32), (3, 32), (32,), (32,))
    )
    y1, y2, total = (
        npu(3, 32, dtype=torch.int8),
        npu(3, 32, dtype=torch.int8),
        npu(3, 32, dtype=torch.half),
    )
    zero = torch.randint(-9, 9, (32,), dtype=torch.int32).npu()
    calls.compute(
        "AddRmsNormQuant", a, b, gamma, scale, None, zero, None, -1, 1e-6, True, y1, y2, total
    )
    expected = torch_npu.npu_add_rms_norm_quant(a, b, gamma, scale, zero)
    assert torch.equal(y1, expected[0])
    assert torch.equal(total, expected[2])
    for given, message in (
        ((None, zero, None, -1, 1e-6, False), "div_mode is false"),
        ((scale, zero, None, -1, 1e-6, True), "scales2"),
    ):
        assert message in calls.refusal(
            "AddRmsNormQuant", a, b, gamma, scale, *given, y1, y2, total
        )


def test_layer_norm_of_the_compatible_mode(calls):
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    out, mean, rstd = npu(3, 8), npu(3, 1), npu(3, 1)
    calls.compute("FastLayerNorm", x.npu(), [8], weight.npu(), bias.npu(), 1e-5, out, mean, rstd)
    near(out, functional.layer_norm(x.double(), [8], weight.double(), bias.double()), ulps=16)
    near(mean, x.double().mean(-1, keepdim=True))
    assert (
        calls.workspace(
            "FastLayerNorm", x.npu(), [7], weight.npu(), bias.npu(), 1e-5, out, mean, rstd
        )[0]
        != 0
    )


def test_dequantization_and_swiglu(calls):
    x, factors = (
        torch.randint(-900, 900, (3, 1024), dtype=torch.int32).npu(),
        (torch.rand(1024) / 100).npu(),
    )
    rows, smooth = torch.rand(3).npu(), torch.rand(512).npu()
    out, scale = npu(3, 512, dtype=torch.int8), npu(3)
    given = (x, factors, rows, None, smooth, None, None)
    calls.compute("DequantSwigluQuant", *given, True, "dynamic", out, scale)
    expected = torch_npu.npu_dequant_swiglu_quant(
        x,
        weight_scale=factors,
        activation_scale=rows,
        quant_scale=smooth,
        activate_left=True,
        quant_mode=1,
    )
    assert torch.equal(out, expected[0])
    assert torch.equal(scale, expected[1])
    message = calls.refusal(
        "DequantSwigluQuant", x, None, rows, None, smooth, None, None, True, "dynamic", out, scale
    )
    assert message.startswith("weight_scale is needed (rule dequant_swiglu_quant.int32-x")


def test_sampling(calls):
    logits, noise = torch.randn(3, 50).half().npu(), torch.rand(3, 50).npu()
    k, p = (
        torch.tensor([5, 50, 9], dtype=torch.int32).npu(),
        torch.tensor([0.9, 0.5, 1.0]).half().npu(),
    )
    chosen, kept = npu(3, dtype=torch.int64), npu(3, 50)
    calls.compute("TopKTopPSample", logits, k, p, noise, 1e-8, True, 32, chosen, kept)
    expected = torch_npu.npu_top_k_top_p_sample(logits, k, p, noise, None, 1e-8, True)
    assert torch.equal(chosen, expected[0])
    assert torch.equal(kept, expected[1])
    assert "top_k is Long (DT_INT64); allowed: Int" in calls.refusal(
        "TopKTopPSample", logits, k.long(), p, noise, 1e-8, True, 32, chosen, kept
    )


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout(calls, p):
    """The mask of the older version, and both steps in one."""
    x, mask, out = torch.rand(1000).npu() + 1, npu(128, dtype=torch.uint8), npu(1000)
    calls.compute("DropoutGenMask", [1000], p, 7, 3, mask)
    bits = lambda: torch.tensor([byte >> i & 1 for byte in mask.tolist() for i in range(8)][:1000])  # noqa: E731
    first = bits()
    assert abs(first.double().mean().item() - (1 - p)) < 0.06
    calls.compute("DropoutV3", x, None, p, 7, 3, out, mask)
    assert torch.equal(bits(), first)  # of the same seed and offset
    near(out, torch.where(first.bool(), x.cpu().double() / max(1 - p, 1e-9), 0))
    assert calls.refusal("DropoutV3", x, None, 1.5, 7, 3, out, mask) == "p is 1.5; allowed: 0 to 1"
    assert "the mask has 64 bits for 1000 values" in calls.refusal(
        "DropoutV3", x, None, p, 7, 3, out, npu(8, dtype=torch.uint8)
    )


def test_index_fill(calls):
    x = torch.randn(4, 6)
    ours, out, expected = x.npu(), npu(4, 6), x.index_fill(1, torch.tensor([0, 5]), 2.5)
    calls.compute("IndexFillTensor", ours, 1, [0, 5], 2.5, out)
    calls.compute("InplaceIndexFillTensor", ours, 1, [0, 5], 2.5)
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(ours.cpu(), expected)
    assert calls.refusal("IndexFillTensor", ours, 2, [0], 2.5, out) == "dim is 2; allowed: -2 to 1"
    assert (
        calls.refusal("InplaceIndexFillTensor", ours, -3, [0], 2.5) == "dim is -3; allowed: -2 to 1"
    )


def test_random_numbers_of_the_whole_range(calls):
    x, again = npu(4000), npu(4000)
    calls.compute("InplaceRandomWithoutFromTo", x, 5, 9)
    assert 0 <= x.min() < 2**20
    assert 2**24 - 2**20 < x.max() <= 2**24
    seed, offset = torch.tensor([5]).npu(), torch.tensor([6]).npu()
    calls.compute("InplaceRandomWithoutFromToTensor", again, seed, offset, 3)
    assert torch.equal(x, again)
    assert "not device memory" in calls.refusal("InplaceRandomWithoutFromTo", torch.zeros(3), 5, 9)


def test_cdist_backward(calls):
    for p, given in ((2.0, 2.0), (1.0, 1.0), (float("inf"), -1.0)):
        a, b, grad, out = torch.randn(4, 3), torch.randn(5, 3), torch.randn(4, 5), npu(4, 3)
        exact = a.double().requires_grad_()
        (expected,) = torch.autograd.grad(torch.cdist(exact, b.double(), p), exact, grad.double())
        arguments = [each.npu() for each in (grad, a, b, torch.cdist(a, b, p))]
        calls.compute("CdistBackward", *arguments, given, out)
        near(out, expected, ulps=64)
        assert "out has shape [3, 4]; it must be [4, 3]" in calls.refusal(
            "CdistBackward", *arguments, given, npu(3, 4)
        )


def test_bucketize(calls):
    x, edges = torch.randn(4, 5), torch.randn(7).sort().values
    out = npu(4, 5, dtype=torch.int32)
    calls.compute("Bucketize", x.npu(), edges.npu(), True, True, out)
    assert torch.equal(out.cpu(), torch.bucketize(x, edges, out_int32=True, right=True))
    assert "boundaries has 2 dimensions; allowed: 1" in calls.refusal(
        "Bucketize", x.npu(), x.npu(), True, True, out
    )
