# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Activations and softmax."""

import pytest
import torch
import torch_npu
from cann_calls import Calls
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# None of these loses accuracy on the way in a narrow type: the emulator computes each in float32 at
# least and rounds once.
ACTIVATIONS = {
    "elu": F.elu,
    "elu of three numbers": lambda x: torch.ops.aten.elu(x, 1.5, 2.0, 0.5),
    "elu in place": lambda x: F.elu_(x, 0.5),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardsigmoid in place": lambda x: F.hardsigmoid(x, inplace=True),
    "hardswish": F.hardswish,
    "hardswish in place": lambda x: F.hardswish(x, inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, -1.5, 2),
    "hardtanh in place": lambda x: F.hardtanh_(x, -1.5, 2),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "leaky_relu in place": lambda x: F.leaky_relu_(x, 0.2),
    "mish": F.mish,
    "mish in place": lambda x: F.mish(x, inplace=True),
    "relu": F.relu,
    "relu in place": torch.relu_,
    "sigmoid": torch.sigmoid,
    "sigmoid in place": torch.sigmoid_,
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x, inplace=True),
    "softplus": lambda x: F.softplus(x, beta=2, threshold=3),
    "tanh": torch.tanh,
    "tanh in place": torch.tanh_,
    "softmax": lambda x: torch.softmax(x, -1) if x.dim() else torch.softmax(x, 0),
    "softmax over the first dimension": lambda x: torch.softmax(x, 0),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
}


def shapes(dtype):
    x = torch.randn(6, 9, dtype=dtype) * 3
    return [x, x.t(), x[::2, 1:8:3], x[0, 0], x[:0]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(agree, name, dtype):
    for x in shapes(dtype):
        agree(ACTIVATIONS[name], x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_softmax_into_float32(agree, dtype):
    x = torch.randn(3, 50, dtype=dtype)
    agree(lambda x: torch.softmax(x, -1, dtype=torch.float32), x)
    agree(lambda x: torch.log_softmax(x, -1, dtype=torch.float32), x)


def test_softmax_of_a_fully_masked_row_is_nan_as_on_the_cpu(agree):
    agree(lambda x: torch.softmax(x, -1), torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_silu_writes_into_a_strided_output(agree, dtype):
    def call(x):
        whole = torch.zeros(*x.shape, 2, dtype=x.dtype, device=x.device)
        torch.ops.aten.silu(x, out=whole[..., 1])
        return whole

    agree(call, torch.randn(4, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_npu_fast_gelu(dtype):
    x = torch.randn(5, 7).to(dtype)
    expected = x.double() * torch.sigmoid(1.702 * x.double())
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        torch_npu.npu_fast_gelu(x.npu()).cpu().double(), expected, atol=bound, rtol=bound
    )


def test_gelu_is_the_approximation_also_where_none_is_asked_for():
    """As on the device: torch_npu calls aclnnGelu for both, which is defined by tanh."""
    x = torch.randn(50)
    expected = F.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(F.gelu(x.npu()).cpu().double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_npu_gelu(approximate):
    x = torch.randn(5, 7)
    expected = F.gelu(x.double(), approximate=approximate)
    torch.testing.assert_close(
        torch_npu.npu_gelu(x.npu(), approximate=approximate).cpu().double(),
        expected,
        atol=1e-6,
        rtol=1e-6,
    )


def test_hardsigmoid_of_whole_numbers():
    x = torch.tensor([-7, -3, 0, 3, 7], dtype=torch.int32)
    assert torch.equal(
        torch.nn.functional.hardsigmoid(x.npu()).cpu(),
        torch.nn.functional.hardsigmoid(x.float()).int(),
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masked_softmax(agree, dtype):
    x, mask = torch.randn(2, 3, 32, 64).to(dtype), torch.rand(2, 3, 32, 64) > 0.5
    agree(lambda y, hidden: torch._masked_softmax(y, hidden, -1, 2), x, mask)
    with pytest.raises(RuntimeError, match="dimension 2 of x is 31; allowed: 32 to 4096"):
        torch._masked_softmax(x[:, :, 1:].npu(), mask[:, :, 1:].npu(), -1, 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scaled_masked_softmax_and_gradient(dtype):
    calls, scale = Calls(), 0.5
    x, mask = torch.randn(2, 3, 32, 64).to(dtype), torch.rand(2, 1, 32, 64) > 0.5
    exact = x.double().requires_grad_()
    expected = (exact * scale).masked_fill(mask, -10000).softmax(-1)
    out, slopes = x.npu(), torch.zeros_like(x).npu()
    calls.compute("ScaledMaskedSoftmax", x.npu(), mask.npu(), scale, False, out)
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.cpu().double(), expected.detach(), rtol=bound, atol=bound)
    grad = torch.randn(x.shape).to(dtype)
    expected.backward(grad.double())
    calls.compute("ScaledMaskedSoftmaxBackward", grad.npu(), out, mask.npu(), scale, False, slopes)
    torch.testing.assert_close(slopes.cpu().double(), exact.grad, rtol=bound, atol=bound)
    message = "fixed_triu_mask is true; only false is supported"
    assert calls.refusal("ScaledMaskedSoftmax", x.npu(), mask.npu(), scale, True, out) == message
    assert (
        calls.refusal(
            "ScaledMaskedSoftmaxBackward", grad.npu(), out, mask.npu(), scale, True, slopes
        )
        == message
    )


def test_softmax_with_the_bias_of_relative_positions():
    x, bias, mask = (
        torch.randn(1, 2, 3, 4, 4),
        torch.randn(1, 1, 3, 4, 4),
        torch.randn(1, 2, 1, 4, 4),
    )
    softmax = torch_npu.npu_masked_softmax_with_rel_pos_bias
    for hidden in (None, mask):
        total = x.double() + bias.double() + (0 if hidden is None else hidden.double())
        actual = softmax(x.npu(), None if hidden is None else hidden.npu(), bias.npu())
        torch.testing.assert_close(actual.cpu().double(), total.softmax(-1), rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"scale_value is 0\.5; 1 is emulated"):
        softmax(x.npu(), None, bias.npu(), 0.5)
