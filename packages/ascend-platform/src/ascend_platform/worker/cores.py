# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Cores of a worker's threads: those that launch operators have a core each, of the NPU's NUMA
node."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_platform.logger import logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

THREADS = Path("/proc/self/task")
ALONE = ("acl_thread", "release_thread")
"""torch_npu's threads that launch operators and release their memory, by the names that it gives
them."""
LEAST = 4
"""Cores of a worker from which on its threads are bound."""


def bind(parallel: "ParallelConfig", local_rank: int) -> None:
    """Bind the threads of this worker after its warm-up, if vLLM has bound it to its NPU's NUMA
    node. Threads that start later stay off the cores of torch_npu's.

    Not where ``CPU_AFFINITY_CONF`` is set, by which torch_npu binds its threads itself.
    """
    nodes = parallel.numa_bind_nodes
    if not parallel.numa_bind or not nodes or "CPU_AFFINITY_CONF" in os.environ:
        return
    cores = share(sorted(os.sched_getaffinity(0)), nodes, local_rank)
    if len(cores) < LEAST:
        logger.info("threads are not bound to cores: %d cores for a worker", len(cores))
        return
    names = {int(each.name): (each / "comm").read_text().strip() for each in THREADS.iterdir()}
    for thread, own in assigned(names, cores).items():
        os.sched_setaffinity(thread, own)
    logger.info("threads are bound to cores %d to %d", cores[0], cores[-1])


def share(cores: Sequence[int], nodes: Sequence[int], local_rank: int) -> Sequence[int]:
    """Those cores of a NUMA node that one of its workers has; ``nodes`` are those of the NPUs."""
    if local_rank >= len(nodes):
        return ()
    node = nodes[local_rank]
    count, before = nodes.count(node), nodes[:local_rank].count(node)
    return cores[len(cores) * before // count : len(cores) * (before + 1) // count]


def assigned(names: dict[int, str], cores: Sequence[int]) -> dict[int, set[int]]:
    """The cores of each thread, by its number and its name: torch_npu's have the last ones. Of a
    name the first thread has the core; threads that it starts inherit its name."""
    first = {name: thread for thread, name in sorted(names.items(), reverse=True)}
    alone = {
        first[name]: {core} for name, core in zip(ALONE, cores[::-1], strict=False) if name in first
    }
    others = set(cores[: -len(ALONE)])
    return {thread: alone.get(thread, others) for thread in names}
