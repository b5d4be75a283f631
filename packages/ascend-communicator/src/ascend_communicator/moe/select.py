"""Which way a step's tokens take to their experts; the same on all ranks."""

import torch
from ascend_platform import extension

from ascend_communicator import WAYS
from ascend_communicator.moe.mc2 import obstacle_to_mc2


def way(asked: str, chip: extension.Chip, sizes: list[int], experts: int, choices: int, hidden: int, dtype: torch.dtype) -> str:
    """The way for a step, the same on all ranks since all that it looks at is.

    mc2 where it serves: it is the one way in which the host does not wait and only chosen copies travel. Else alltoall where less
    travels than with allgather: ``choices`` copies of a token each way, against one to each of the ranks. Else allgather.

    Args:
        asked: ``auto``, or the way to take; ``mc2`` for steps of more tokens than it takes is ``alltoall``.
        chip: the NPU.
        sizes: tokens of each rank.
        experts, choices: experts of all ranks, and how many each token chooses.
        hidden, dtype: of a token.

    Raises:
        ValueError: mc2 was asked for and cannot serve this model here.
    """
    ranks = len(sizes)
    obstacle = obstacle_to_mc2(chip, ranks, experts, choices, hidden, dtype)
    if asked == "mc2" and obstacle:
        raise ValueError(
            f"ascend.communicator.all2all is mc2, which cannot serve: {obstacle}; set auto or {' or '.join(WAYS[:2])}"
        )
    limits = chip.family.mc2
    if asked in ("auto", "mc2") and limits and not obstacle and min(sizes) >= 1 and max(sizes) <= limits.tokens:
        return "mc2"
    if asked == "auto":
        exchangeable = chip.family.moe_routing and experts % ranks == 0
        return "alltoall" if exchangeable and choices < ranks else "allgather"
    return "alltoall" if asked == "mc2" else asked
