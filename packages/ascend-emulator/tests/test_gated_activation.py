# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Gated activations, plain and quantized, against the formulas of torch_npu's documentation in
float64."""

import pytest
import torch
import torch_npu
from comparisons import close_numbers, same_integers
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((7, 64), -1), ((3, 5, 128), -1), ((2, 6, 10), 1), ((8, 3), 0), ((0, 16), -1)],
)
def test_swiglu(shape, dim, dtype):
    x = torch.randn(shape).to(dtype)
    gate, up = x.double().chunk(2, dim)
    close_numbers(
        torch_npu.npu_swiglu(x.npu(), dim=dim), F.silu(gate) * up, 3 * torch.finfo(dtype).eps
    )


def test_swiglu_of_strided_rows_is_refused():
    x = torch.randn(5, 3, 32).npu()
    with pytest.raises(RuntimeError, match=r"x has strides \[96, 1\].*rule swiglu.contiguous"):
        torch_npu.npu_swiglu(x[:, 1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_swiglu_of_the_ends_of_the_exponential(dtype):
    ends = [
        -torch.inf,
        -300,
        -104,
        -89,
        -88.5,
        -87,
        -17,
        0,
        17,
        87,
        88.5,
        104,
        300,
        torch.inf,
        torch.nan,
    ]
    x = torch.tensor([*ends, *[1.0] * len(ends)]).to(dtype)
    gate, up = x.double().chunk(2)
    actual = torch_npu.npu_swiglu(x.npu()[None])[0].cpu().double()
    bound = 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        actual, (F.silu(gate) * up).to(dtype).double(), atol=1e-36, rtol=bound, equal_nan=True
    )


def swiglu(x, left):
    first, second = x.double().chunk(2, -1)
    return F.silu(first) * second if left else F.silu(second) * first


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("mode", "kind"), [(1, 0), (1, 1), (0, 0)])
def test_swiglu_quant(mode, kind, left):
    x, smooth, offsets = torch.randn(6, 32), torch.rand(3, 16) + 0.5, torch.randn(3, 16)
    index = torch.tensor([1, 4, 6] if kind == 0 else [1, 3, 2], dtype=torch.int32)
    if mode == 0:
        smooth = smooth * 40
    values, scale = torch_npu.npu_swiglu_quant(
        x.npu(),
        smooth_scales=smooth.npu(),
        offsets=offsets.npu(),
        group_index=index.npu(),
        activate_left=left,
        quant_mode=mode,
        group_list_type=kind,
    )
    group = torch.tensor([0, 1, 1, 1, 2, 2])
    wide = swiglu(x, left) * smooth.double()[group]
    if mode == 1:
        close_numbers(scale, 127 / wide.abs().amax(-1), 1e-4)
        same_integers(values, wide * (127 / wide.abs().amax(-1))[:, None], -128, 127)
    else:
        same_integers(values, wide + offsets.double()[group], -128, 127)


@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("grouped", [False, True])
def test_dequant_swiglu_quant(grouped, variant):
    x = torch.randint(-100, 100, (5, 1024), dtype=torch.int32)
    groups = 2 if grouped else 1
    weight_scale, per_token, smooth = (
        torch.rand(groups, 1024) * 0.05,
        torch.rand(5, 1),
        torch.rand(groups, 512) + 0.5,
    )
    group = torch.tensor([0, 0, 1, 1, 1] if grouped else [0] * 5)
    index = torch.tensor([2, 3]).npu() if grouped else None
    values, scale = torch_npu.npu_dequant_swiglu_quant(
        x.npu(),
        weight_scale=weight_scale.npu(),
        activation_scale=per_token.npu(),
        quant_scale=smooth.npu(),
        group_index=index,
        activate_left=True,
        quant_mode=1,
        swiglu_mode=variant,
        clamp_limit=7.0,
        glu_alpha=1.702,
        glu_bias=1.0,
    )
    wide = x.double() * weight_scale.double()[group] * per_token.double()
    if variant:
        gate, value = wide[:, ::2].clamp(max=7), wide[:, 1::2].clamp(-7, 7)
        wide = gate * torch.sigmoid(1.702 * gate) * (value + 1)
    else:
        wide = swiglu(wide, True)
    wide = wide * smooth.double()[group]
    step = wide.abs().amax(-1) / 127
    close_numbers(scale, step)
    same_integers(values, wide / step[:, None], -128, 127)


@pytest.mark.parametrize("interleaved", [True, False])
def test_clipped_swiglu(interleaved):
    x = torch.randn(6, 32) * 2
    actual = torch_npu.npu_clipped_swiglu(
        x.npu(),
        group_index=torch.tensor([1, 3]).npu(),
        dim=-1,
        alpha=0.7,
        limit=1.0,
        bias=1.2,
        interleaved=interleaved,
    )
    wide = x[:4].double()
    gate, value = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, -1)
    gate = gate.clamp(max=1)
    close_numbers(actual[:4], gate * torch.sigmoid(0.7 * gate) * (value.clamp(-1, 1) + 1.2))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_mul(approximate):
    x = torch.randn(3, 5, 8)
    first, second = x.double().chunk(2, -1)
    close_numbers(
        torch_npu.npu_gelu_mul(x.npu(), approximate=approximate),
        F.gelu(first, approximate=approximate) * second,
    )


def gradients(function, reference, *arguments):
    """The same cotangent through both."""
    ours = [x.npu().requires_grad_() for x in arguments]
    wide = [x.double().requires_grad_() for x in arguments]
    result, expected = function(*ours), reference(*wide)
    close_numbers(result, expected.detach())
    cotangent = torch.randn(expected.shape)
    result.backward(cotangent.npu())
    expected.backward(cotangent.double())
    for actual, other in zip(ours, wide, strict=True):
        close_numbers(actual.grad, other.grad)


@pytest.mark.parametrize("approximate", [0, 1])
@pytest.mark.parametrize("left", [False, True])
def test_geglu_and_gradient(left, approximate):
    def reference(x):
        first, second = x.chunk(2, -1)
        gate, value = (first, second) if left else (second, first)
        return F.gelu(gate, approximate="tanh" if approximate else "none") * value

    gradients(
        lambda x: torch_npu.npu_geglu(x, -1, approximate, left)[0], reference, torch.randn(4, 10)
    )


def test_gradient_of_swiglu():
    gradients(
        lambda x: torch_npu.npu_swiglu(x, dim=0),
        lambda x: F.silu(x.chunk(2, 0)[0]) * x.chunk(2, 0)[1],
        torch.randn(6, 4),
    )


def test_gradient_of_fast_gelu():
    gradients(torch_npu.npu_fast_gelu, lambda x: x * torch.sigmoid(1.702 * x), torch.randn(4, 10))


def test_odd_width_is_refused():
    with pytest.raises(RuntimeError, match="it must be even"):
        torch_npu.npu_gelu_mul(torch.randn(4, 5, dtype=torch.float16, device="npu"))


def test_wide_rows_of_gelu_mul_are_refused():
    with pytest.raises(
        RuntimeError, match="the last dimension of input is 1026; allowed: 2 to 1024"
    ):
        torch_npu.npu_gelu_mul(torch.randn(4, 1026, dtype=torch.float16, device="npu"))
