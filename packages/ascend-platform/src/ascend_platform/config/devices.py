# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The NPUs of this machine: whether they suffice for the parallel layout, and their NUMA nodes."""

import os
import re
import shutil
from typing import TYPE_CHECKING

import torch

from ascend_platform import host
from ascend_platform.errors import RefusedError
from ascend_platform.logger import logger
from ascend_platform.process.scopes import scopes_here

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def check(parallel: "ParallelConfig") -> None:
    """Refuse a layout that needs more NPUs than are visible, where vLLM starts all workers on this
    machine.

    Raises:
        RefusedError: the numbers of NPUs needed and visible, in one line.
    """
    if parallel.distributed_executor_backend not in (None, "mp", "uni") or parallel.nnodes > 1:
        return
    if parallel.data_parallel_backend == "ray" or "platform" not in scopes_here():
        # An engine's process sees its part of the devices; the main process has checked all.
        return
    needed = parallel.world_size * parallel.data_parallel_size_local
    assigned = parallel.assigned_physical_gpu_ids
    visible = torch.npu.device_count() if assigned is None else len(assigned)  # creates no context
    present = host.npu_count()[0] if assigned else 0
    if missing := [each for each in assigned or () if present and each >= present]:
        raise RefusedError(
            f"--device-ids names NPU {', '.join(map(str, missing))}, and this machine has {present};"
            f" fix: choose among 0 to {present - 1}"
        )
    if needed > visible:
        context = parallel.prefill_context_parallel_size
        sizes = {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            **({"prefill context": context} if context > 1 else {}),
            "data": parallel.data_parallel_size_local,
        }
        layout = " x ".join(f"{name} {size}" for name, size in sizes.items())
        needs = f"the layout needs {needed} NPUs ({layout})"
        listed, wrong = os.environ.get(host.VISIBLE_NPUS), ""
        if listed is not None and assigned is None:
            wrong, fix = host.unused_npus(listed, host.npu_count()[0])
        if wrong:
            raise RefusedError(f"{needs}, and {host.VISIBLE_NPUS}={wrong}; fix: {fix}")
        raise RefusedError(
            f"{needs} and {visible} are visible; fix: lower --tensor-parallel-size,"
            " --pipeline-parallel-size or --data-parallel-size-local, or add NPUs to"
            f" {host.VISIBLE_NPUS}"
        )


def bind_to_numa_nodes(parallel: "ParallelConfig", by_default: bool) -> None:
    """Set the NUMA node of each NPU in the order of vLLM's devices, which vLLM reads for CUDA
    devices only; no binding where it is unknown.

    Args:
        by_default: bind without --numa-bind, too, where vLLM starts the workers and the machine has
            several NUMA nodes.
    """
    asked = parallel.numa_bind
    if not asked:
        local = parallel.distributed_executor_backend in (None, "mp", "uni")
        local = local and parallel.data_parallel_backend != "ray" and "platform" in scopes_here()
        if not by_default or not local or not host.has_numa_nodes():
            return
    places, obstacle = host.npu_places()
    nodes = [place.node for place in places]
    if not obstacle and parallel.assigned_physical_gpu_ids is not None:  # --device-ids
        listed = os.environ.get(host.VISIBLE_NPUS)
        ids = list(map(int, re.findall(r"\d+", listed))) if listed else range(len(nodes))
        known = dict(zip(ids, nodes, strict=False))
        unknown = [each for each in parallel.assigned_physical_gpu_ids if each not in known]
        nodes = [known[each] for each in parallel.assigned_physical_gpu_ids if each in known]
        obstacle = f"NPU {unknown[0]} of --device-ids is not visible" if unknown else ""
    if not obstacle and not shutil.which("numactl"):
        obstacle = "numactl is not installed"
    parallel.numa_bind = not obstacle
    if not obstacle:
        parallel.numa_bind_nodes = nodes
        logger.info("--numa-bind: NUMA nodes of the NPUs: %s", ", ".join(map(str, nodes)))
    elif asked:
        logger.warning(
            "--numa-bind disabled: %s; fix: give the nodes of the NPUs, in their order, with"
            " --numa-bind-nodes",
            obstacle,
        )
    else:
        logger.info("workers are not bound to NUMA nodes: %s", obstacle)
