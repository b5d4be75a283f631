"""Selection of the all2all backend of a step."""

import torch
from ascend_platform import extension

from ascend_communicator import ALL2ALL_BACKENDS
from ascend_communicator.moe import mc2


def select_backend(
    requested: str, chip: extension.Chip, sizes: list[int], num_experts: int, top_k: int, hidden: int, dtype: torch.dtype
) -> str:
    """Select the backend of a step. The result is the same on all ranks, because the arguments are.

    mc2 where it is supported, as it sends only routed copies and does not synchronize with the host. Else alltoall where it sends
    less than allgather: ``top_k`` copies of a token each way, against one per rank. Else allgather.

    Args:
        requested: ``auto`` or a backend. Steps with more tokens than ``mc2`` supports use ``alltoall`` instead.
        chip: the NPU.
        sizes: tokens of each rank.
        num_experts, top_k: experts of all ranks, and experts per token.
        hidden, dtype: elements of a token, and their dtype.

    Raises:
        ValueError: mc2 is requested and not supported for this model on this chip.
    """
    ranks = len(sizes)
    reason = mc2.unsupported_reason(chip, ranks, num_experts, top_k, hidden, dtype)
    if requested == "mc2" and reason:
        supported = " or ".join(ALL2ALL_BACKENDS[:2])
        raise ValueError(f"ascend.communicator.all2all is mc2, which is not supported here: {reason}; set auto or {supported}")
    limits = chip.family.mc2
    if requested in ("auto", "mc2") and limits and not reason and min(sizes) >= 1 and max(sizes) <= limits.tokens:
        return "mc2"
    if requested == "auto":
        has_alltoall = chip.family.moe_routing and num_experts % ranks == 0
        return "alltoall" if has_alltoall and top_k < ranks else "allgather"
    return "alltoall" if requested == "mc2" else requested
