# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_sleep_mode.py: the ranks of an engine, two stages of two, go to sleep, which the first
rank's KV connector refuses at first.

Prints one line `RESULT {json}` with, for each rank and each of two attempts, what it raised, its state,
what its component was told, and the sum of its weights after it was woken up.
"""

import json
import os
from types import SimpleNamespace
from typing import Any

import torch
from ascend_platform.errors import RefusedError
from ascend_platform.plugins import slots
from ascend_platform.worker import sleep_mode
from harness import launcher
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

RANKS = 4
told: list[bool] = []
refusing = []


def awake(state: bool) -> None:
    told.append(state)
    if refusing and not state:
        raise RefusedError("the KV cache is still being read")


def attempt(backend: sleep_mode.VirtualMemoryBackend, weights: torch.Tensor) -> dict[str, Any]:
    told.clear()
    raised = ""
    try:
        backend.suspend(1)
    except Exception as error:
        raised = str(error)
    state = backend.state()
    backend.resume()
    return {"raised": raised, "state": state, "told": told[:2], "weights": weights.sum().item()}


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
    backend = sleep_mode.VirtualMemoryBackend(SimpleNamespace())
    with backend.pool("weights"):
        weights = torch.ones(1 << 20, device="npu")
    refusing[:] = [None] * (rank == 0)
    first = attempt(backend, weights)
    refusing.clear()
    return [first, attempt(backend, weights)]


if __name__ == "__main__":
    found = launcher.run_ranks("sleeping_ranks.py", RANKS, play)
    print("RESULT", json.dumps({"name": "sleep", "ranks": found}))
