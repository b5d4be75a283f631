"""The NPUs of this machine: whether they are enough for the layout, and their NUMA nodes."""

import shutil
from typing import TYPE_CHECKING

import torch

from ascend_platform import extension, host

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def check(parallel: "ParallelConfig") -> None:
    """Refuse a layout that needs more NPUs than this machine shows, where vLLM starts all workers on this machine.

    Raises:
        RefusedError: how many are needed and how many are there, in one line.
    """
    if parallel.distributed_executor_backend not in (None, "mp", "uni") or parallel.nnodes > 1:
        return
    if parallel.data_parallel_backend == "ray" or "platform" not in extension.scopes_here():
        return  # an engine's own process has its part of the devices, and the main process has looked at all
    needed = parallel.world_size * parallel.data_parallel_size_local
    given = parallel.assigned_physical_gpu_ids
    found = torch.npu.device_count() if given is None else len(given)  # counted without opening one
    if needed > found:
        raise extension.RefusedError(
            f"the layout needs {needed} NPUs (tensor {parallel.tensor_parallel_size} x pipeline {parallel.pipeline_parallel_size}"
            f" x data {parallel.data_parallel_size_local}) and {found} can be used; lower --tensor-parallel-size, "
            f"--pipeline-parallel-size or --data-parallel-size-local, or widen {host.VISIBLE_NPUS}"
        )


def find_numa_nodes(parallel: "ParallelConfig") -> None:
    """For --numa-bind: the NUMA node of each NPU, which vLLM asks of CUDA's platform alone; no binding where it is not known."""
    nodes, obstacle = host.numa_nodes()
    if not obstacle and not shutil.which("numactl"):
        obstacle = "the program numactl is not installed"
    if obstacle:
        parallel.numa_bind = False
        extension.logger.warning(
            "--numa-bind is off: %s; --numa-bind-nodes takes the nodes of the NPUs, one after another", obstacle
        )
    else:
        parallel.numa_bind_nodes = nodes
        extension.logger.info("--numa-bind: the NPUs are next to the NUMA nodes %s", ", ".join(map(str, nodes)))
