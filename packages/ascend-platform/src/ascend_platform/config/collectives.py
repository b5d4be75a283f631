# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Settings of HCCL that depend on the parallel layout: how long a step may wait for collectives,
and where they run."""

import os
from typing import TYPE_CHECKING

from ascend_platform.logger import logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

STEP, COLLECTIVE = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "HCCL_EXEC_TIMEOUT"
DEFAULTS = {STEP: 300, COLLECTIVE: 1836}
MARGIN = 120
"""Seconds that a step outlasts a collective: HCCL rounds its limit up to a multiple of 68."""


def seconds(variable: str) -> int:
    """The limit that one of the two variables sets; 0 is none, also where the value is
    no number."""
    value = os.environ.get(variable) or str(DEFAULTS[variable])
    return int(value) if value.isdigit() else 0


def prepare(parallel: "ParallelConfig") -> None:
    """Let a step outlast a collective, whose error names the missing rank, and warn of AIV with
    several groups of ranks."""
    if parallel.world_size_across_dp == 1:
        return
    if STEP not in os.environ and seconds(COLLECTIVE) + MARGIN > DEFAULTS[STEP]:
        os.environ[STEP] = str(seconds(COLLECTIVE) + MARGIN)
    several = {
        "expert parallelism": parallel.enable_expert_parallel,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": (
            max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size) > 1
        ),
    }
    names = [name for name, is_used in several.items() if is_used]
    if names and os.environ.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        logger.warning(
            "HCCL_OP_EXPANSION_MODE is AIV with %s: CANN does not support it for several groups of"
            " ranks of an NPU at a time, and collectives may hang; fix: unset"
            " HCCL_OP_EXPANSION_MODE",
            " and ".join(names),
        )
