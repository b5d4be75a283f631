# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_sleep_mode.py: the ranks of an engine, two stages of two, go to sleep, which the first
rank's KV connector refuses at first, and wake up, which fails on the first rank at first.

Prints one line `RESULT {json}` with, for each rank and each of three attempts, what it raised, its
state, what its component was told, and the sum of its weights after it was woken up.
"""

import json
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from ascend_platform.errors import RefusedError
from ascend_platform.plugins import slots
from ascend_platform.worker import virtual_memory
from ascend_platform.worker.worker import NPUWorker
from harness.engines import launcher
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

RANKS = 4
calls: list[bool] = []
refusing = []


def awake(state: bool) -> None:
    calls.append(state)
    if refusing and not state:
        raise RefusedError("the KV cache is still being read")


def attempt(function: Callable[..., None], *arguments: Any) -> str:
    """Message of the function's exception; ``calls`` is emptied."""
    calls.clear()
    try:
        function(*arguments)
    except Exception as error:
        return str(error)
    return ""


def sleep(worker: NPUWorker, weights: torch.Tensor) -> dict[str, Any]:
    raised = attempt(worker.sleep, 1)
    state = worker.sleep_mode_backend.state()
    worker.wake_up()
    return {"raised": raised, "state": state, "told": calls[:2], "weights": weights.sum().item()}


def wake_up(worker: NPUWorker, weights: torch.Tensor, fails: bool) -> dict[str, Any]:
    """Without memory at first, on a rank that fails."""
    call = virtual_memory._call

    def without_memory(name: str, *arguments: Any) -> None:
        if name == "aclrtMallocPhysical":
            raise torch.OutOfMemoryError("no free memory")
        call(name, *arguments)

    worker.sleep(1)
    virtual_memory._call = without_memory if fails else call
    raised = attempt(worker.wake_up)
    virtual_memory._call = call
    state, early = worker.sleep_mode_backend.state(), [*calls]
    worker.wake_up()
    return {"raised": raised, "state": state, "told": early, "weights": weights.sum().item()}


def play(rank: int, port: int) -> list[dict[str, Any]]:
    os.environ.update(launcher.torchrun_variables(rank, RANKS, port))
    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        parallel_state.init_distributed_environment(RANKS, rank, "env://", rank, "hccl")
        parallel_state.initialize_model_parallel(2, 2, backend="hccl")
    slots._offers.clear()
    slots.offer("worker.awake", f"{__name__}.awake")
    worker = NPUWorker.__new__(NPUWorker)
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enable_nccl_comm_suspend=False)
    )
    worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers = {}, {}
    worker._sleep_saved_parameters = {}
    with worker.sleep_mode_backend.pool("weights"):
        weights = torch.ones(1 << 20, device="npu")
    refusing[:] = [None] * (rank == 0)
    first = sleep(worker, weights)
    refusing.clear()
    return [first, sleep(worker, weights), wake_up(worker, weights, rank == 0)]


if __name__ == "__main__":
    results = launcher.run_ranks("sleeping_ranks.py", RANKS, play)
    print("RESULT", json.dumps({"name": "sleep", "ranks": results}))
