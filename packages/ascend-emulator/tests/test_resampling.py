# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Interpolation, sampling on grids and padding, with their gradients."""

import pytest
import torch
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
LINE, PLANE, VOLUME = (2, 3, 7), (2, 3, 5, 6), (1, 2, 3, 4, 5)
CASES = {
    **{
        f"{mode} of {len(shape) - 2} dimensions to {to}": (
            lambda x, m=mode, t=to: F.interpolate(x, mode=m, **t),
            shape,
        )
        for modes, shape in (
            (["nearest", "nearest-exact", "linear"], LINE),
            (["nearest", "nearest-exact", "bilinear", "bicubic"], PLANE),
            (["nearest", "nearest-exact", "trilinear"], VOLUME),
        )
        for mode in modes
        for to in ({"size": [9, 8, 7][: len(shape) - 2]}, {"scale_factor": 2.0})
    },
    **{
        f"{mode}, corners aligned": (
            lambda x, m=mode: F.interpolate(x, scale_factor=1.5, mode=m, align_corners=True),
            shape,
        )
        for mode, shape in (
            ("linear", LINE),
            ("bilinear", PLANE),
            ("bicubic", PLANE),
            ("trilinear", VOLUME),
        )
    },
    "bilinear, smoothed": (
        lambda x: F.interpolate(x, (3, 4), mode="bilinear", antialias=True),
        PLANE,
    ),
    "bicubic, smoothed": (
        lambda x: F.interpolate(x, (3, 4), mode="bicubic", antialias=True),
        PLANE,
    ),
    **{
        f"{mode} of {dims} dimensions": (
            lambda x, m=mode, d=dims: F.pad(x, [2, 1, 1, 2, 1, 1][: 2 * d], mode=m),
            shape,
        )
        for mode in ("reflect", "replicate")
        for dims, shape in ((1, LINE), (2, PLANE), (3, VOLUME))
    },
    "affine_grid": (
        lambda x: F.affine_grid(x[0, :2, :2, :3], (2, 3, 4, 5), align_corners=False),
        PLANE,
    ),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_resampling(agree_backward, name, dtype):
    function, shape = CASES[name]
    if dtype != torch.float32 and "smoothed" in name:
        pytest.skip("PyTorch on the CPU has none to compare with")
    agree_backward(function, torch.randn(shape).to(dtype), ulps=32)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [False, True])
def test_grid_sample(agree_backward, mode, padding, align):
    def sample(x, grid):
        return F.grid_sample(x, grid, mode, padding, align)

    # Coordinates in eighths, off the ties of nearest, and exact in every type.
    agree_backward(
        sample, torch.randn(PLANE), torch.randint(-11, 11, (2, 4, 3, 2)) / 8 + 1 / 32, ulps=64
    )
    if mode != "bicubic":
        agree_backward(
            sample,
            torch.randn(VOLUME),
            torch.randint(-11, 11, (1, 2, 4, 3, 3)) / 8 + 1 / 32,
            ulps=64,
        )
