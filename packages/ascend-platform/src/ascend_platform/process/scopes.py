# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scopes of patches: the type of this vLLM process (``platform``, ``engine``, ``worker``)."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os

from ascend_platform.logger import logger
from ascend_platform.plugins.plugin_filter import PluginFilter


def scopes_here() -> tuple[str, ...]:
    """The scopes that this process is known to have before vLLM creates anything in it.

    vLLM's process names are set by ``multiprocessing.spawn.prepare`` before the child unpickles,
    hence imports, anything of vLLM: ``EngineCore`` or ``EngineCore_DP<n>``
    (``vllm/v1/engine/utils.py``, ``CoreEngineProcManager``) and ``VllmWorker-<n>``
    (``vllm/v1/executor/multiproc_executor.py``). Any other process counts as the main process.
    Engine and worker can also run in the main process, in that of the engine, or in a Ray actor;
    there the platform enters their scopes from the hooks that vLLM calls.
    """
    name = multiprocessing.current_process().name
    if name.startswith("EngineCore"):
        return ("engine",)
    if name.startswith("VllmWorker-"):
        return ("worker",)
    is_single = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    return ("platform", "engine") if is_single else ("platform",)


def enter(scope: str) -> None:
    """Tell the components that patch vLLM that this process has a scope: ``platform``, ``engine``
    or ``worker``.

    They are the entry points of group ``vllm_ascend.scopes``, functions that take the scope. Entry
    points are used because general plugins load too late: in the engine core only after
    ``EngineCoreProc.__init__`` has begun. Never raises.
    """
    filtered = PluginFilter.current()
    for point in importlib.metadata.entry_points(group="vllm_ascend.scopes"):
        if filtered.allows(point.name):
            try:
                point.load()(scope)
            except Exception as error:
                failed = "%s failed to enter scope %s: %s: %s"
                logger.warning(failed, point.value, scope, type(error).__name__, error)
