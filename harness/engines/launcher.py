# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Launch ranks as torchrun does, but forked from one process, so that torch and vLLM are imported
once; find shared memory."""

import contextlib
import gc
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
from harness.engines.ports import free_port


def shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """Files of shared memory that the processes have open."""
    names: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            names |= set(re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE))
    return names


def torchrun_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment variables that torchrun sets for a rank on a single node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_ranks(what: str, ranks: int, work: Callable[[int, int], Any]) -> list[Any]:
    """Run `work(rank, port)` in a fork for each rank; returns the results, passed as JSON. `port`
    is free, the same for all.

    If a rank fails, its traceback is printed and the program exits with a message that begins with
    `what`.
    """
    port = free_port()
    gc.freeze()  # what is imported: see imports.py
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, str(rank)) for rank in range(ranks)]
        children = [_fork(work, rank, port, file) for rank, file in enumerate(files)]
        failed = [os.waitpid(child, 0)[1] for child in children]
        if any(failed):
            sys.exit(f"{what}: the ranks ended with {failed}")
        return [json.loads(file.read_text()) for file in files]


def difference(ranks: list[Any]) -> str:
    """The first place where a rank's results are others than rank 0's, and both values; "" if there
    is none."""
    for rank, results in enumerate(ranks):
        if place := _place(ranks[0], results):
            return f"rank {rank} has other results than rank 0: {place}"
    return ""


def _place(one: Any, other: Any, at: str = "") -> str:
    if one == other:
        return ""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        keys: Iterable[Any] = one
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        keys = range(len(one))
    else:
        return f"{at} {one!r} and {other!r}"
    return next(filter(None, (_place(one[key], other[key], f"{at}[{key!r}]") for key in keys)))


def _fork(work: Callable[[int, int], Any], rank: int, port: int, file: Path) -> int:
    child = os.fork()
    if not child:
        # Imported objects stay frozen when vLLM ends the engine, as this process ends then: two
        # collections of a million objects are a quarter of the time of a small engine.
        gc.unfreeze = lambda: None
        status = 1
        try:
            file.write_text(json.dumps(work(rank, port)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return child
