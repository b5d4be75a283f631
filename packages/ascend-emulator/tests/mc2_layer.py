# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A layer of a mixture of experts over several ranks, for mc2_scenarios.py."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from mc2_matmul_scenarios import name_of

# The experts' function, which is exact in every dtype.
FACTORS = (0.5, -1.0, 2.0, -0.5, 1.0, -2.0, 0.25, -4.0)
SHARED_FACTORS = (8.0, -8.0)


def routing(
    rank: int, tokens: int, choices: int, experts: int, uneven: bool = False
) -> torch.Tensor:
    """Different experts for each token; uneven: none of this rank's tokens go to the last half."""
    generator = torch.Generator().manual_seed(77 + rank)
    reach = max(experts // 2, choices) if uneven else experts
    return torch.stack(
        [torch.randperm(reach, generator=generator)[:choices] for _ in range(tokens)]
    ).int()


def weights(rank: int, tokens: int, choices: int) -> torch.Tensor:
    return torch.rand(tokens, choices, generator=torch.Generator().manual_seed(9 + rank))


class Layer:
    """One rank's view of a mixture of experts."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        experts: int,
        shared: int = 0,
        shared_ranks: int = 0,
        **more: Any,
    ) -> None:
        self.rank, self.ranks, self.experts, self.shared, self.shared_ranks = (
            rank,
            ranks,
            experts,
            shared,
            shared_ranks,
        )
        self.common: dict[str, Any] = {
            "group_ep": name_of(rank),
            "ep_world_size": ranks,
            "ep_rank_id": rank,
            "moe_expert_num": experts,
            "shared_expert_num": shared or 1,
            "shared_expert_rank_num": shared_ranks,
        } | more

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, first: bool = False, **more: Any) -> Any:
        function = (
            torch_npu.npu_moe_distribute_dispatch
            if first
            else torch_npu.npu_moe_distribute_dispatch_v2
        )
        return function(x=x.npu(), expert_ids=ids.npu(), **self.common, **more)

    def apply(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Outputs of this rank's experts for their rows; later rows are unused."""
        out = torch.full_like(rows, float("nan"))
        if self.rank < self.shared_ranks:
            factors: tuple[float, ...] = (
                SHARED_FACTORS[self.rank // (self.shared_ranks // self.shared)],
            )
        else:
            local = self.experts // (self.ranks - self.shared_ranks)
            factors = FACTORS[(self.rank - self.shared_ranks) * local :][:local]
        start = 0
        for factor, number in zip(factors, numbers.tolist(), strict=True):
            out[start : start + number] = rows[start : start + number] * factor
            start += number
        return out

    def combine(
        self, rows: torch.Tensor, ids: torch.Tensor, given: Any, scales: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        return torch_npu.npu_moe_distribute_combine_v2(
            expand_x=rows,
            expert_ids=ids.npu(),
            assist_info_for_combine=given[2],
            ep_send_counts=given[4],
            expert_scales=scales.npu(),
            expand_scales=(
                given[6] if torch.npu.get_device_name().startswith("Ascend910B") else None
            ),
            **self.common,
            **more,
        )
