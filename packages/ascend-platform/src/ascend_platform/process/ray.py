# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Environment of vLLM's Ray workers, and what they leave behind."""

import os
import subprocess
import sys
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, cast

from ascend_platform.host import VISIBLE_NPUS
from ascend_platform.overrides import guard
from ascend_platform.plugins import SECRETS

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

OF_EACH_WORKER = (VISIBLE_NPUS, "HCCL_IF_IP", *SECRETS)
"""Variables that vLLM does not copy to Ray's workers."""

_trackers: list["subprocess.Popen[bytes]"] = []


def prepare(parallel: "ParallelConfig") -> None:
    """Keep each node's own visible NPUs and address, and let each worker's shared memory be removed
    with the worker.

    Secrets are not copied: Ray keeps the environment of an actor in its state, which its dashboard
    and API show. vLLM copies the driver's environment to workers, except for such
    variables (``vllm/v1/executor/ray_executor_v2.py``). It ends workers by ``ray.kill``, which by
    default also kills their children, among them Python's resource tracker, which removes the
    shared memory.
    """
    guard.install("common", "process.ray")
    runtime_env: dict[str, Any] = dict(parallel.ray_runtime_env or {})
    variables = {"RAY_kill_child_processes_on_worker_exit": "0"} | runtime_env.get("env_vars", {})
    parallel.ray_runtime_env = cast(Any, runtime_env | {"env_vars": variables})


def keep_resource_tracker() -> None:
    """Start Python's resource tracker in a session of its own, in a process of Ray.

    It removes the shared memory of a process that is killed. Ray kills the process group of a
    worker that has died, in which Python would start it.
    """
    tracker: Any = resource_tracker._resource_tracker
    if "ray" not in sys.modules or tracker._fd is not None:
        return
    read, write = os.pipe()
    program = f"from multiprocessing.resource_tracker import main; main({read})"
    command = [sys.executable, "-c", program]
    _trackers.append(subprocess.Popen(command, pass_fds=[read], start_new_session=True))
    os.close(read)
    tracker._fd = write  # Like multiprocessing.spawn in a child process, which has its parent's.
