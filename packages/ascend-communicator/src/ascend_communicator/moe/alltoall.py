# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""All2all backend alltoall: each copy of a token is sent to the rank of its expert and back."""

import torch
import torch.distributed as dist
import torch_npu
from ascend_platform import extension

MOST_COLUMNS = 16383
"""Of npu_moe_re_routing's tokens (op-plugin's page)."""


def dispatch_and_combine(
    group: dist.ProcessGroup,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    experts: extension.Experts,
) -> torch.Tensor:
    """Apply the experts of all ranks to this rank's tokens ``[tokens, hidden]``; see
    ``HCCLAll2AllManager.dispatch_and_combine``. Experts that take int8 get it so, in half of the
    bytes."""
    # The copies are sorted by expert, hence by rank.
    rows, row_idx, counts, scale = torch_npu.npu_moe_init_routing_v2(
        x,
        topk_ids,
        active_num=topk_ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
        quant_mode=1 if experts.takes_int8 else -1,
    )
    local_counts = torch.empty_like(counts)
    dist.all_to_all_single(local_counts, counts, group=group)
    by_rank = torch.stack((counts, local_counts)).view(2, group.size(), -1)
    # This synchronizes, because HCCL takes the message sizes from the host.
    sent, received = by_rank.sum(-1).tolist()
    received_rows = _exchanged(rows, received, sent, group)
    scales = None
    if experts.takes_int8:
        scales = _exchanged(scale.unsqueeze(1), received, sent, group)
    outputs = x.new_empty((0, x.shape[1]))
    if len(received_rows):
        outputs = _apply_sorted(received_rows, scales, by_rank[1], experts)
    expert_out = _exchanged(outputs, sent, received, group)
    return torch_npu.npu_moe_token_unpermute(expert_out, row_idx, probs=topk_weights)


def _exchanged(
    rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """The rows that the ranks send to this one, sorted by rank."""
    output = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(output, rows, received, sent, group=group)
    return output


def _apply_sorted(
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    counts: torch.Tensor,
    experts: extension.Experts,
) -> torch.Tensor:
    """Apply experts to rows sorted by rank and then by expert, after sorting them by expert; counts
    ``[ranks, experts]``, scales ``[rows, 1]`` of int8 rows."""
    grouped, totals = regroup(rows, counts)
    scale = None if scales is None else regroup(scales, counts)[0].squeeze(1)
    return regroup(experts(grouped, totals, scale), counts.t())[0]


def regroup(rows: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort rows ``[rows, hidden]`` by group, from an order by part and then by group; undone with
    the transposed counts.

    The index that the operator returns is of the rows to read, which only a sort of integers could
    invert.

    Args:
        counts: int64 ``[parts, groups]``, adjacent rows of a part's group.

    Returns:
        The rows, and how many each group has, int64 ``[groups]``.
    """
    # The operator only moves rows and does not support float32, so view them as twice as many
    # float16.
    values = rows.view(torch.float16) if rows.dtype == torch.float32 else rows
    pieces = 1  # Number of parts of a row that has more columns than the operator accepts.
    while values.shape[1] % pieces or values.shape[1] // pieces > MOST_COLUMNS:
        pieces += 1
    moved, _, _, totals = torch_npu.npu_moe_re_routing(
        values.reshape(-1, values.shape[1] // pieces),
        (counts if pieces == 1 else counts * pieces).contiguous(),
    )
    return moved.view(rows.dtype).view(rows.shape), totals if pieces == 1 else totals // pieces
