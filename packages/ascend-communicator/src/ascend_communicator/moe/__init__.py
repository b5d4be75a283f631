"""MoE dispatch and combine over expert parallel ranks: all2all manager, backends and their selection."""

from collections.abc import Callable

import torch

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Applies a rank's experts to rows ``[rows, hidden]`` sorted by expert, with rows per expert int64 ``[experts]``."""
