# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
# run:
# refused: aclnnAdds: a tensor of shape \[1, 1, 1, 1, 1, 1, 1, 1, 2\] has 9 dimensions; allowed: up to 8
# source: PyTorch's tests on Atlas A3: cannot be larger than 8 dimensions
# seen on hardware: yes
"""A tensor of nine dimensions: CANN's operators take eight."""

import torch
import torch_npu  # noqa: F401

x = torch.ones(2, device="npu").view(1, 1, 1, 1, 1, 1, 1, 1, 2)
print((x + 1).sum().item())
