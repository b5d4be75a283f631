# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Installed distributions and their entry points."""

from __future__ import annotations

import functools
import importlib.metadata

from packaging.utils import canonicalize_name


@functools.cache
def distributions() -> dict[str, importlib.metadata.Distribution]:
    """Installed distributions by normalized name; of two with one name, the one that Python finds
    first."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(canonicalize_name(name), distribution)
    return found


def names() -> set[str]:
    """All names that VLLM_PLUGINS may list, of plugins of any group."""
    return {point.name for _, point in points() if point.group.startswith("vllm.")}


def points() -> list[tuple[str, importlib.metadata.EntryPoint]]:
    """All entry points, each with its distribution's name."""
    return [
        (name, point)
        for name, distribution in distributions().items()
        for point in distribution.entry_points
    ]
