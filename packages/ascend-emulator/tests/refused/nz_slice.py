# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A slice of a weight in FRACTAL_NZ, used as if its values were in row-major order."""
# run:
# refused: mat2 has shape \[64, 32\], strides \[96, 1\] and offset 32 in storage .* only the whole matrix
# source: torch_npu, FRACTAL_NZ in storage (NPUStorageDesc)
# seen on hardware: no

import torch
import torch_npu

torch.npu.config.allow_internal_format = True
weight = torch_npu.npu_format_cast(torch.randn(64, 96).half().npu(), 29)
print((torch.randn(4, 64).half().npu() @ weight[:, 32:64]).cpu())
