# run:
# refused: aclnnAdds: a tensor of shape \[1, 1, 1, 1, 1, 1, 1, 1, 2\] has 9 dimensions; allowed: up to 8
"""A tensor of nine dimensions: CANN's operators take eight."""

import torch
import torch_npu  # noqa: F401

x = torch.ones(1, 1, 1, 1, 1, 1, 1, 1, 2, device="npu")
print((x + 1).sum().item())
