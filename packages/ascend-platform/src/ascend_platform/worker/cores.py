# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Cores of a worker's threads: those that launch operators have a core each, of the NPU's NUMA
node.

The NPUs of a node divide its cores, visible or not: engines, containers and data-parallel ranks that
know nothing of each other have other cores where they have other NPUs.
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_platform import host
from ascend_platform.logger import logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

THREADS = Path("/proc/self/task")
ALONE = ("acl_thread", "release_thread")
"""torch_npu's threads that launch operators and release their memory, by the names that it gives
them."""
KEPT = len(ALONE) + 1
"""Cores of a worker for these threads and for the main thread."""
LEAST = KEPT + 1
"""Cores of a worker from which on its threads are bound."""
_claims: dict[str, socket.socket] = {}


def bind(parallel: "ParallelConfig", npu: int) -> None:
    """Bind the threads of this worker after its warm-up, if vLLM has bound it to its NPU's NUMA
    node. Threads that start later stay off the cores of torch_npu's threads.

    A second engine on the same NPU keeps off those of the first and has no cores of its own.
    Containers with a network of their own do not see each other: with the same NPU they have the
    same cores. Not where ``CPU_AFFINITY_CONF`` is set, by which torch_npu binds its threads itself.

    Args:
        npu: number of the NPU in this process.
    """
    if not parallel.numa_bind or not parallel.numa_bind_nodes or "CPU_AFFINITY_CONF" in os.environ:
        return
    places, obstacle = host.npu_places()
    if obstacle or npu >= len(places):
        logger.info("threads are not bound to cores: %s", obstacle or f"NPU {npu} is unknown")
        return
    place, usable = places[npu], sorted(os.sched_getaffinity(0))
    # A list of the user's is this worker's.
    cores = usable if parallel.numa_bind_cpus else shared(usable, place)
    if len(cores) < LEAST:
        logger.info("threads are not bound to cores: %d cores for a worker", len(cores))
        return
    names = {int(each.name): (each / "comm").read_text().strip() for each in THREADS.iterdir()}
    is_first = claim(place.bus)
    for thread, own in assigned(names, cores, os.getpid(), is_first).items():
        os.sched_setaffinity(thread, own)
    logger.info(
        "threads are bound to cores %d to %d%s",
        cores[0],
        cores[-1],
        "" if is_first else ", without cores of their own: another process uses the NPU",
    )


def shared(usable: Sequence[int], place: host.NPUPlace) -> list[int]:
    """Those cores of an NPU's node that belong to the NPU and that this process may use."""
    every = host.node_cores(place.node)
    first, last = (len(every) * each // place.npus for each in (place.position, place.position + 1))
    return [core for core in every[first:last] if core in usable]


def claim(bus: str) -> bool:
    """Whether this process is the first one of the machine that binds threads for the NPU; it is
    until it ends. The claim is a name of a socket, which any user may take."""
    if bus in _claims:  # An engine before in this process has made it.
        return True
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0ascend-platform-cores-{bus}")
    except OSError:
        mark.close()
        return False
    _claims[bus] = mark
    return True


def assigned(
    names: dict[int, str], cores: Sequence[int], main: int, is_first: bool = True
) -> dict[int, set[int]]:
    """The cores of each thread, by its number and its name. Threads of torch_npu have the last
    ones, and only the main thread the one before. Of a name the first thread has the core; threads
    that it starts inherit its name."""
    others, mains = set(cores[:-KEPT]), set(cores[: -len(ALONE)])
    if not is_first:
        return dict.fromkeys(names, others)
    first = {name: thread for thread, name in sorted(names.items(), reverse=True)}
    alone = {
        first[name]: {core} for name, core in zip(ALONE, cores[::-1], strict=False) if name in first
    }
    return dict.fromkeys(names, others) | {main: mains} | alone
