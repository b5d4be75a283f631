# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A matrix product whose tensors fit, but not its workspace: 16 MiB on Atlas A2, and torch_npu's
rounding."""
# run: --memory 128MiB
# refused: NPU out of memory. Tried to allocate 18\.00 MiB
# class: NPU out of memory
# source: CANN, GetWorkspaceSize; 16 MiB of the cube on Atlas A2
# seen on hardware: no

import torch
import torch_npu  # noqa: F401

x = torch.ones(64, 64, device="npu")
rest = torch.empty(torch.npu.mem_get_info()[0] - (12 << 20), dtype=torch.uint8, device="npu")
print((x @ x).sum().item())
