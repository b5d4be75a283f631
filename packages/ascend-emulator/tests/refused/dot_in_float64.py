# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
# run:
# refused: aclnnDot: self is Double \(DT_DOUBLE\); allowed: BFloat16, Half, Float, Byte, Char, Int
# source: PyTorch's tests on Atlas A3
# seen on hardware: yes
"""A dot product in float64, which every gradcheck ends in."""

import torch
import torch_npu  # noqa: F401

x = torch.ones(4, dtype=torch.float64, device="npu")
print(torch.dot(x, x).item())
