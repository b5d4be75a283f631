# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Short-time Fourier transform and its inverse against the CPU in float64."""

import re

import pytest
import torch

HANN = torch.hann_window(32)


def transform(x, **options):
    options = {"n_fft": 32, "return_complex": True} | options
    return torch.stft(
        x,
        **{
            name: o.to(x.device) if isinstance(o, torch.Tensor) else o
            for name, o in options.items()
        },
    )


def near(actual, expected, dtype):
    bound = 64 * torch.finfo(dtype).eps
    assert (actual.shape, actual.dtype.is_complex) == (expected.shape, expected.dtype.is_complex)
    torch.testing.assert_close(actual.cpu().to(expected.dtype), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hop_length": 5},
        {"center": False},
        {"pad_mode": "constant"},
        {"window": HANN},
        {"window": torch.hamming_window(20), "win_length": 20, "hop_length": 8},
        {"normalized": True, "window": HANN},
        {"onesided": False},
        {"return_complex": False},
        {"return_complex": False, "onesided": False, "normalized": True},
        {"n_fft": 25, "hop_length": 7, "window": torch.hann_window(25)},
    ],
    ids=str,
)
def test_transform(dtype, options):
    options = {
        name: o.to(dtype) if isinstance(o, torch.Tensor) else o for name, o in options.items()
    }
    wide = {name: o.double() if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    for shape in ((2, 200), (3, 4096), (200,)):
        x = torch.randn(shape).to(dtype)
        near(transform(x.npu(), **options), transform(x.double(), **wide), dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_signal(dtype):
    x = torch.randn(2, 200, dtype=dtype)
    options = {"hop_length": 8, "center": False}  # padding by reflection takes no complex128
    near(transform(x.npu(), **options), transform(x.to(torch.complex128), **options), torch.float32)


def test_inverse_and_gradient():
    x = torch.randn(2, 320)
    ours, wide = x.npu().requires_grad_(), x.double().requires_grad_()
    actual, expected = transform(ours, window=HANN), transform(wide, window=HANN.double())
    back = torch.istft(actual, 32, window=HANN.npu())
    torch.testing.assert_close(back.cpu(), x[:, : back.size(1)], atol=1e-5, rtol=1e-5)
    actual.abs().square().sum().backward()
    expected.abs().square().sum().backward()
    torch.testing.assert_close(ours.grad.cpu().double(), wide.grad, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (
            torch.ones(50).double(),
            {"window": HANN},
            "window is Float (DT_FLOAT) and self is Double (DT_DOUBLE)",
        ),
        (
            torch.ones(50) + 0j,
            {"onesided": True, "center": False},
            "onesided is true and self is ComplexDouble (DT_COMPLEX128)",
        ),
    ],
    ids=["window", "onesided"],
)
def test_undocumented_arguments_are_refused_at_the_call(x, options, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        transform(x.to(torch.complex128 if x.is_complex() else x.dtype).npu(), **options)
