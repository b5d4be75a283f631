# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Programs of several ranks: torch is imported once, each rank of each scenario is a fork that
returns something for JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ascend_emulator.activation import set_environment

TIMEOUT = 60
SCENARIOS: dict[str, tuple[Callable[[int, int], Any], int, str, dict[str, str]]] = {}


def scenario(
    name: str, ranks: int = 2, soc: str = "Ascend910B1", **environ: str
) -> Callable[..., Any]:
    """Register a function of (rank, ranks) that runs within an initialised process group, or with
    no group if `plain_c` is given.

    torch_npu's watchdog ends the process when a collective failed, unless told not to: then the
    error is that of the call. Communicators have small buffers: an NPU has 512 MiB.
    """
    environ = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0", "HCCL_BUFFSIZE": "16"} | environ

    def register(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        SCENARIOS[name] = (function, ranks, soc, environ)
        return function

    return register


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu().double().tolist() if value.is_floating_point() else value.cpu().tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def failure(function: Callable[[], Any]) -> str:
    """The error that it ends with, its first lines. A stream that failed stays so: the process ends
    after this.

    torch_npu empties its task queue before it marks it as failed (Repository::ReadQueue in
    NPUQueue.cpp), so that one synchronization can miss the error; a later one reports it, unless
    the watchdog's thread has been told meanwhile, by the end of an event, which no caller sees. So the
    next one follows at once, and a scenario whose call itself fails has no queue
    (TASK_QUEUE_ENABLE=0).
    """
    try:
        function()
        for _ in range(500):
            torch.npu.synchronize()
            time.sleep(0.01)
    except Exception as error:
        os.environ["SCENARIO_FAILED"] = "1"
        return str(error)[:3000]
    return "no error"


def timed(function: Callable[[], Any]) -> list[Any]:
    started = time.monotonic()
    return [failure(function), time.monotonic() - started]


def data(rank: int, shape: Any, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """This rank's input, on the CPU: small numbers, so that PROD reductions stay in range."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def torch_dtype(name: str) -> torch.dtype:
    result = getattr(torch, name)
    assert isinstance(result, torch.dtype)
    return result


def run_rank(function: Callable[[int, int], Any], rank: int, ranks: int, directory: str) -> Any:
    torch.npu.set_device(rank % torch.npu.device_count())
    if "plain_c" in os.environ:
        os.environ["SCENARIO_DIRECTORY"] = directory
        return function(rank, ranks)
    store = dist.FileStore(f"{directory}/store", ranks)
    dist.init_process_group(
        "hccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT)
    )
    result = function(rank, ranks)
    if "SCENARIO_FAILED" in os.environ:
        return result
    torch.npu.synchronize()
    dist.destroy_process_group()
    return result


def fork(
    function: Callable[[int, int], Any],
    rank: int,
    ranks: int,
    soc: str,
    environ: dict[str, str],
    directory: str,
) -> tuple[int, int]:
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    threads = open(f"{directory}/threads{rank}", "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(TIMEOUT - 5, file=threads)
    try:
        set_environment(os.environ, ranks, soc, 1 << 29)
        os.environ.update(environ)
        answer = run_rank(function, rank, ranks, directory)
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"[:3000]
    with os.fdopen(writer, "w") as pipe:
        pipe.write(json.dumps(answer))
    os._exit(0)


def play(name: str) -> list[Any]:
    """Results by rank; of a rank without a result, how it ended, or where its threads were when it
    was killed at the timeout."""
    function, ranks, soc, environ = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as directory:
        children = [fork(function, rank, ranks, soc, environ, directory) for rank in range(ranks)]
        answers: list[Any] = []
        deadline = time.monotonic() + TIMEOUT
        for rank, (child, reader) in enumerate(children):
            text = b""
            while True:
                ready, _, _ = select.select([reader], [], [], max(deadline - time.monotonic(), 0))
                piece = os.read(reader, 1 << 16) if ready else b""
                if not piece:
                    break
                text += piece
            if not ready:
                os.kill(child, signal.SIGKILL)
            os.close(reader)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if text:
                answers.append(json.loads(text))
            elif ready:
                answers.append(f"rank {rank} ended with status {status}, without a result")
            else:
                threads = Path(directory, f"threads{rank}").read_text()
                answers.append(
                    f"rank {rank} was killed after {TIMEOUT} s; its threads:\n{threads}"[:3000]
                )
        return answers
