# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A convolution in float32 that expects float32's precision: NPUs multiply in HF32 unless
torch.npu.conv.allow_hf32 is off."""
# run:
# refused: AssertionError: the convolution differs from float64 by \d\.\de-0[34]
# class: AssertionError
# source: torch_npu, torch.npu.conv.allow_hf32; CANN, cubeMathType
# seen on hardware: no

import torch
import torch_npu  # noqa: F401

x, weight = torch.randn(2, 64, 16, 16), torch.randn(8, 64, 3, 3)
expected = torch.nn.functional.conv2d(x.double(), weight.double())
error = (
    ((torch.nn.functional.conv2d(x.npu(), weight.npu()).cpu() - expected) / expected.std())
    .abs()
    .max()
    .item()
)
assert error < 1e-5, f"the convolution differs from float64 by {error:.1e}"
