"""MoE dispatch and combine over expert parallel ranks: all2all manager, backends and their selection."""

from dataclasses import dataclass
from typing import Protocol

import torch


class Experts(Protocol):
    """Applies a rank's experts to rows ``[rows, hidden]`` sorted by expert, with rows per expert int64 ``[experts]``.

    An attribute ``takes_int8`` that is true says that rows may be int8, quantized by row with ``scale`` float32 ``[rows]``.
    """

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor: ...


@dataclass(frozen=True)
class MoEShape:
    """Sizes of an MoE layer: ranks, experts of all ranks, experts per token, and a token's elements and their dtype."""

    ranks: int
    experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype
