# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Formats of tensors in the NPU's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FRACTAL_NZ = 29  # ACL_FORMAT_FRACTAL_NZ


def to_nz(matrix: torch.Tensor) -> torch.Tensor:
    """A copy of a matrix in the format FRACTAL_NZ, in which cube units read weights."""
    import torch
    import torch_npu

    # Otherwise torch_npu creates base formats. The attribute cannot be read.
    torch.npu.config.allow_internal_format = True
    try:
        return torch_npu.npu_format_cast(matrix.contiguous(), FRACTAL_NZ)
    finally:
        torch.npu.config.allow_internal_format = False  # torch_npu's default


def is_nz(matrix: torch.Tensor) -> bool:
    """Whether a matrix is in the format FRACTAL_NZ."""
    import torch_npu

    return int(torch_npu.get_npu_format(matrix)) == FRACTAL_NZ
