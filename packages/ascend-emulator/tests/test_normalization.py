"""Normalizations, against their definitions in float64."""

import pytest
import torch
import torch_npu
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 64), (5, 7, 96), (2, 3, 4, 50), (257, 1024), (0, 8)]


def rms(x, gamma, epsilon):
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    inverse = (x.pow(2).mean(dims, keepdim=True) + epsilon).rsqrt()
    return x * inverse * gamma, inverse


def close(actual, expected, ulps=3):
    bound = ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.cpu().double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape, dtype):
    x, gamma = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    expected, inverse = rms(x.double(), gamma.double(), 1e-5)
    y, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-5)
    assert (y.dtype, rstd.dtype) == (dtype, torch.float32)
    close(y, expected)
    close(rstd, inverse, ulps=8)


def test_rms_norm_over_two_dimensions_and_of_strided_rows():
    x, gamma = torch.randn(4, 5, 6), torch.randn(5, 6)
    close(torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)[0], rms(x.double(), gamma.double(), 1e-6)[0])
    wide, gamma = torch.randn(9, 3, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    part = wide.npu()[:, 1]
    assert not part.is_contiguous()
    close(torch_npu.npu_rms_norm(part, gamma.npu(), 1e-6)[0], rms(wide[:, 1].double(), gamma.double(), 1e-6)[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(shape, dtype):
    a, b, gamma = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    total = (a.double() + b.double()).to(dtype)
    y, rstd, x = torch_npu.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), 1e-5)
    assert torch.equal(x.cpu(), total)
    expected, inverse = rms(total.double(), gamma.double(), 1e-5)
    close(y, expected)
    close(rstd, inverse, ulps=8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(agree, affine, dtype):
    x = torch.randn(6, 5, 32).to(dtype)
    parameters = [torch.randn(32).to(dtype), torch.randn(32).to(dtype)] if affine else []
    agree(lambda x, *p: F.layer_norm(x, (32,), *p, eps=1e-5), x, *parameters, ulps=8)
    agree(lambda x, *p: F.layer_norm(x, (32,), *p, eps=1e-5), x.transpose(0, 1), *parameters, ulps=8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_torch_rms_norm(agree, dtype):
    agree(lambda x, w: F.rms_norm(x, (32,), w, 1e-5), torch.randn(6, 32).to(dtype), torch.randn(32).to(dtype), ulps=8)
