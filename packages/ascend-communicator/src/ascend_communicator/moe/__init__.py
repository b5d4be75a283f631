# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""MoE dispatch and combine over expert parallel ranks: all2all manager, backends and their
selection."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MoEShape:
    """Sizes of an MoE layer: ranks, experts of all ranks, experts per token, and a token's elements
    and their dtype."""

    ranks: int
    experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype
