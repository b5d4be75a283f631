"""Dispatch and combine of MoE tokens over expert-parallel ranks."""

from collections.abc import Callable

import torch

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Applies a rank's experts to rows ``[rows, hidden]`` in the order of experts; int64 ``[experts]`` has the rows of each."""
