# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Contracts between wheels that have no base class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Experts(Protocol):
    """A rank's experts, applied to rows sorted by expert: what ``dispatch_and_combine`` of a
    communicator's all2all manager takes."""

    @property
    def takes_int8(self) -> bool:
        """Whether rows are int8, quantized by row with ``scale``."""
        ...

    def __call__(
        self, rows: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The outputs ``[rows, hidden]`` in the model's dtype.

        Args:
            rows: ``[rows, hidden]`` in the model's dtype, or int8.
            counts: rows of each of the rank's experts, int64 ``[experts]``.
            scale: of int8 rows, float32 ``[rows]``; None for others.
        """
        ...
