# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Selection of the all2all backend of a step."""

from ascend_platform import extension

from ascend_communicator import ALL2ALL_BACKENDS
from ascend_communicator.moe import MoEShape, mc2


def select_backend(
    requested: str, chip: extension.Chip, sizes: list[int], shape: MoEShape, limit: mc2.Limit
) -> tuple[str, str]:
    """Select the backend of a step. The result is the same on all ranks, because the arguments are.

    mc2 where it is supported, as it sends only routed copies and does not synchronize with the
    host. Else alltoall where it sends less than allgather: ``top_k`` copies of a token each way,
    against one per rank. Else allgather.

    Args:
        requested: ``auto`` or a backend. Steps with more tokens than ``mc2`` takes use ``alltoall``
            instead.
        chip: the NPU.
        sizes: tokens of each rank.
        shape: of the layer.
        limit: tokens that mc2 takes.

    Returns:
        The backend, and why it is not mc2 ("" if it was not requested).

    Raises:
        RefusedError: mc2 is requested and not supported for this model on this chip.
    """
    if requested == "mc2" and not limit.tokens:
        supported = " or ".join(ALL2ALL_BACKENDS[:2])
        raise extension.RefusedError(
            f"ascend.communicator.all2all is mc2, which is not supported here: {limit.reason}; fix:"
            f" set auto or {supported}"
        )
    if requested not in ("auto", "mc2"):
        return requested, ""
    if min(sizes) >= 1 and max(sizes) <= limit.tokens:
        return "mc2", ""
    if requested == "mc2" or (
        chip.family.moe_routing and shape.experts % shape.ranks == 0 and shape.top_k < shape.ranks
    ):
        return "alltoall", limit.reason
    return "allgather", limit.reason
