# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Slot for diagnostics of vLLM's processes, which an entry point fills. Without one, vLLM's errors
are shown as they are."""

from __future__ import annotations

import functools
import importlib.metadata

from ascend_platform.logger import logger
from ascend_platform.plugins.plugin_filter import PluginFilter
from ascend_platform.protocols import Diagnostics

GROUP = "vllm_ascend.diagnostics"
"""Group of the entry point, whose name VLLM_PLUGINS filters: a module or an object with the methods
of :class:`Diagnostics`. Of several, the first by name is used.

An entry point is used because the first call comes as Python starts, before vLLM loads plugins.
"""


def start_command() -> None:
    """One of vLLM's commands starts, whatever VLLM_PLUGINS has: it may be the cause of an error.
    Never raises."""
    _call("start_command")


def watch() -> None:
    """This process has the platform, or vLLM has configured its logging. Never raises."""
    if _is_allowed():
        _call("watch")


def read_reports() -> None:
    """The directory of vLLM's sockets is about to be removed. Never raises."""
    if _is_allowed():
        _call("read_reports")


def _call(method: str) -> None:
    try:
        if (found := _load()) is not None:
            getattr(found, method)()
    except Exception as error:
        logger.warning("%s failed: %s: %s", GROUP, type(error).__name__, error)


def _is_allowed() -> bool:
    point = _entry_point()
    return point is not None and PluginFilter.current().allows(point.name)


@functools.cache
def _entry_point() -> importlib.metadata.EntryPoint | None:
    points = importlib.metadata.entry_points(group=GROUP)
    return min(points, key=lambda point: point.name, default=None)


@functools.cache
def _load() -> Diagnostics | None:
    point = _entry_point()
    return point.load() if point is not None else None
