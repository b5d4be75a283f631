# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Normalizations, plain and fused with an addition or a quantization, against their definitions in
float64."""

import importlib.metadata
import re

import pytest
import torch
import torch_npu
from comparisons import close
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
HALVES = FLOATS[1:]
SHAPES = [(1, 64), (5, 7, 96), (2, 3, 4, 50), (257, 1024), (0, 8)]


def near(actual, expected):
    """Whole numbers may differ by one where the exact value lies between two."""
    assert (actual.cpu().double() - expected.round()).abs().max() <= 1
    assert (actual.cpu().double() - expected).abs().max() <= 0.51


def rms(x, gamma, epsilon=1e-6):
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    inverse = (x.pow(2).mean(dims, keepdim=True) + epsilon).rsqrt()
    return x * inverse * gamma, inverse


def pair(dtype, shape=(3, 5, 64)):
    return (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[-1]).to(dtype),
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape, dtype):
    x, gamma = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    expected, inverse = rms(x.double(), gamma.double(), 1e-5)
    y, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-5)
    assert (y.dtype, rstd.dtype) == (dtype, torch.float32)
    close(y, expected, ulps=3)
    close(rstd, inverse, ulps=8)


def test_rms_norm_over_two_dimensions_and_of_strided_rows():
    x, gamma = torch.randn(4, 5, 6), torch.randn(5, 6)
    close(
        torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)[0],
        rms(x.double(), gamma.double(), 1e-6)[0],
        ulps=3,
    )
    wide, gamma = torch.randn(9, 3, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    part = wide.npu()[:, 1]
    assert not part.is_contiguous()
    close(
        torch_npu.npu_rms_norm(part, gamma.npu(), 1e-6)[0],
        rms(wide[:, 1].double(), gamma.double(), 1e-6)[0],
        ulps=3,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(shape, dtype):
    a, b, gamma = (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[-1]).to(dtype),
    )
    total = (a.double() + b.double()).to(dtype)
    y, rstd, x = torch_npu.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), 1e-5)
    assert torch.equal(x.cpu(), total)
    expected, inverse = rms(total.double(), gamma.double(), 1e-5)
    close(y, expected, ulps=3)
    close(rstd, inverse, ulps=8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(agree, affine, dtype):
    x = torch.randn(6, 5, 32).to(dtype)
    parameters = [torch.randn(32).to(dtype), torch.randn(32).to(dtype)] if affine else []
    agree(lambda x, *p: F.layer_norm(x, (32,), *p, eps=1e-5), x, *parameters, ulps=8)
    agree(
        lambda x, *p: F.layer_norm(x, (32,), *p, eps=1e-5), x.transpose(0, 1), *parameters, ulps=8
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_torch_rms_norm(agree, dtype):
    agree(
        lambda x, w: F.rms_norm(x, (32,), w, 1e-5),
        torch.randn(6, 32).to(dtype),
        torch.randn(32).to(dtype),
        ulps=8,
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_add_rms_norm_cast(dtype):
    a, b, gamma = pair(dtype)
    wide, y, rstd, total = torch_npu.npu_add_rms_norm_cast(a.npu(), b.npu(), gamma.npu())
    assert (wide.dtype, y.dtype) == (torch.float32, dtype)
    close(total, a.double() + b.double())
    expected, inverse = rms(total.cpu().double(), gamma.double())
    close(y, expected)
    close(rstd, inverse, ulps=16)
    assert torch.equal(wide, y.float())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_add_rms_norm_in_place(dtype):
    a, b, gamma = pair(dtype)
    x1, x2 = a.npu(), b.npu()
    rstd = torch.ops.npu.npu_add_rms_norm_v2(x1, x2, gamma.npu())
    close(x2, a.double() + b.double())
    expected, inverse = rms(x2.cpu().double(), gamma.double())
    close(x1, expected)
    close(rstd, inverse, ulps=16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gemma_rms_norm(dtype):
    x, _, gamma = pair(dtype)
    y, rstd = torch_npu.npu_gemma_rms_norm(x.npu(), gamma.npu())
    expected, inverse = rms(x.double(), 1 + gamma.double())
    close(y, expected)
    close(rstd, inverse, ulps=16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rms_norm_backward(dtype):
    x, grad, gamma = pair(dtype)
    ours = x.npu().requires_grad_(), gamma.npu().requires_grad_()
    torch_npu.npu_rms_norm(*ours)[0].backward(grad.npu())
    wide = x.double().requires_grad_(), gamma.double().requires_grad_()
    rms(*wide)[0].backward(grad.double())
    close(ours[0].grad, wide[0].grad, ulps=8)
    close(
        ours[1].grad.to(torch.float32),
        wide[1].grad,
        ulps=(
            64
            if dtype == torch.float32
            else 1 / torch.finfo(torch.float32).eps * torch.finfo(dtype).eps * 8
        ),
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_add_rms_norm_quant(full, divides, dtype):
    a, b, gamma = pair(dtype)
    scales, zeros = torch.rand(64) * 0.05 + 0.02, torch.randint(-10, 10, (64,), dtype=torch.int32)
    scale = scales if divides else 1 / scales
    beta = torch.randn(64).to(dtype)
    options = (
        {"beta": beta.npu(), "scales2": (scale * 2).npu(), "zero_points2": zeros.npu()}
        if full
        else {}
    )
    y1, y2, total = torch_npu.npu_add_rms_norm_quant(
        a.npu(), b.npu(), gamma.npu(), scale.npu(), zeros.npu(), **options, div_mode=divides
    )
    close(total, a.double() + b.double())
    y = rms(a.double() + b.double(), gamma.double())[0] + (beta.double() if full else 0)
    factor = 1 / scale.double() if divides else scale.double()
    near(y1, (y * factor + zeros).clamp(-128, 127))
    if full:
        near(y2, (y * factor * (0.5 if divides else 2) + zeros).clamp(-128, 127))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["default", "plain", "smooth", "only second"])
def test_add_rms_norm_dynamic_quant(kind, dtype):
    if kind == "default" and importlib.metadata.version("torch-npu").startswith("2.10."):
        pytest.skip(
            "torch_npu 2.10 does not accept its own default of output_mask, an empty list for two"
            " flags"
        )
    a, b, gamma = pair(dtype)
    smooth = [torch.rand(64).to(dtype) + 0.5 for _ in range(2)]
    options = {
        "default": {},
        "plain": {"output_mask": [True, False]},
        "smooth": {
            "smooth_scale1": smooth[0].npu(),
            "smooth_scale2": smooth[1].npu(),
            "output_mask": [True, True],
        },
        "only second": {"smooth_scale2": smooth[1].npu(), "output_mask": [False, True]},
    }[kind]
    y1, y2, total, scale1, scale2 = torch_npu.npu_add_rms_norm_dynamic_quant(
        a.npu(), b.npu(), gamma.npu(), **options
    )
    close(total, a.double() + b.double())
    y = rms(a.double() + b.double(), gamma.double())[0]
    for out, scale, factor, there in (
        (y1, scale1, smooth[0] if kind == "smooth" else None, kind != "only second"),
        (y2, scale2, smooth[1], kind in ("smooth", "only second")),
    ):
        if not there:
            continue
        smoothed = y * factor.double() if factor is not None else y
        expected = smoothed.abs().amax(-1) / 127
        close(scale, expected, ulps=32)
        near(out, smoothed / expected[..., None])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rms_norm_quant(dtype):
    x, _, gamma = pair(dtype)
    beta, scale, offset = (
        torch.randn(64).to(dtype),
        torch.tensor([30.0]).to(dtype),
        torch.tensor([3], dtype=torch.int8),
    )
    y = torch_npu.npu_rms_norm_quant(x.npu(), gamma.npu(), beta.npu(), scale.npu(), offset.npu())
    expected = ((rms(x.double(), gamma.double())[0] + beta.double()) * scale.double() + 3).clamp(
        -128, 127
    )
    near(y, expected)
    y, _ = torch.ops.npu.npu_rms_norm_quant_v2(
        x.npu(), gamma.npu(), (1 / scale.float()).npu(), beta=beta.npu()
    )
    near(
        y,
        (
            (expected - 3).clamp(-128, 127)
            if expected.abs().max() < 120
            else ((rms(x.double(), gamma.double())[0] + beta.double()) * 30).clamp(-128, 127)
        ),
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_add_layer_norm_and_its_gradient(dtype):
    a, b, gamma = pair(dtype)
    beta, grad = torch.randn(64).to(dtype), torch.randn(3, 5, 64).to(dtype)
    y, mean, rstd, total = torch_npu.npu_add_layer_norm(
        a.npu(), b.npu(), gamma.npu(), beta.npu(), 1e-5, True
    )
    wide = [x.double().requires_grad_() for x in (a, b, gamma, beta)]
    expected = F.layer_norm(wide[0] + wide[1], (64,), wide[2], wide[3], 1e-5)
    close(y, expected.detach())
    close(total, (a.double() + b.double()))
    dx, _, dgamma, dbeta = torch_npu.npu_add_layer_norm_backward(
        grad.npu(), a.npu(), b.npu(), rstd, mean, gamma.npu(), None
    )
    expected.backward(grad.double())
    close(dx, wide[0].grad, ulps=16)
    torch.testing.assert_close(dgamma.cpu().double(), wide[2].grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(dbeta.cpu().double(), wide[3].grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_deep_norm_and_its_gradient(dtype):
    x, gx, gamma = pair(dtype)
    beta, grad = torch.randn(64).to(dtype), torch.randn(3, 5, 64).to(dtype)
    mean, rstd, y = torch_npu.npu_deep_norm(x.npu(), gx.npu(), beta.npu(), gamma.npu(), 0.3, 1e-6)
    wide = [t.double().requires_grad_() for t in (x, gx, gamma, beta)]
    expected = F.layer_norm(0.3 * wide[0] + wide[1], (64,), wide[2], wide[3], 1e-6)
    close(y, expected.detach())
    close(mean, (0.3 * x.double() + gx.double()).mean(-1, keepdim=True), ulps=8)
    dx, dgx, dbeta, dgamma = torch_npu.npu_deep_norm_backward(
        grad.npu(), x.npu(), gx.npu(), gamma.npu(), mean, rstd, 0.3
    )
    expected.backward(grad.double())
    close(dx, wide[0].grad, ulps=16)
    close(dgx, wide[1].grad, ulps=16)
    torch.testing.assert_close(dgamma.cpu().double(), wide[2].grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(dbeta.cpu().double(), wide[3].grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_group_norms(dtype):
    x, weight, bias = (
        torch.randn(2, 6, 4, 4).to(dtype),
        torch.randn(6).to(dtype),
        torch.randn(6).to(dtype),
    )
    out, mean, rstd = torch_npu.npu_group_norm_silu(x.npu(), weight.npu(), bias.npu(), 3, 1e-5)
    groups = x.double().view(2, 3, -1)
    normed = F.group_norm(x.double(), 3, weight.double(), bias.double(), 1e-5)
    close(out, F.silu(normed))
    close(mean, groups.mean(-1), ulps=8)
    close(rstd, (groups.var(-1, correction=0) + 1e-5).rsqrt(), ulps=8)
    ours = [t.npu().requires_grad_() for t in (x, weight, bias)]
    out = torch_npu.npu_group_norm_swish(ours[0], 3, ours[1], ours[2], eps=1e-5, swish_scale=1.5)[0]
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    normed = F.group_norm(wide[0], 3, wide[1], wide[2], 1e-5)
    expected = normed * torch.sigmoid(1.5 * normed)
    close(out.detach(), expected.detach())
    grad = torch.randn_like(x)
    out.backward(grad.npu())
    expected.backward(grad.double())
    for t, wanted in zip(ours, wide, strict=True):
        close(t.grad, wanted.grad, ulps=64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, g: torch_npu.npu_rms_norm(x, g[:32]), "gamma has shape [32]"),
        (
            lambda x, g: torch_npu.npu_gemma_rms_norm(x, g.float()),
            "gamma is Float (DT_FLOAT) and input is Half (DT_FLOAT16)",
        ),
        (lambda x, g: torch_npu.npu_gemma_rms_norm(x[:, :2], g), "it must be contiguous"),
        (
            lambda x, g: torch_npu.npu_add_rms_norm_cast(x.float(), x.float(), g.float()),
            "x1 is Float (DT_FLOAT); allowed: Half, BFloat16",
        ),
        (lambda x, g: torch_npu.npu_group_norm_silu(x, None, None, 2, 1e-5), "group is 2"),
    ],
)
def test_arguments_outside_the_documentation_are_refused(call, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(torch.randn(4, 3, 64).half().npu(), torch.randn(64).half().npu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rms_norm_with_a_float32_gamma(dtype):
    x, gamma = torch.randn(5, 32).to(dtype), torch.rand(32)
    y, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)
    wide = x.double()
    inverse = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    bound = torch.finfo(y.dtype).eps * 2
    torch.testing.assert_close(
        y.cpu().double(), wide * inverse * gamma.double(), rtol=bound, atol=bound
    )
    torch.testing.assert_close(rstd.cpu().double(), inverse, rtol=1e-6, atol=0)
