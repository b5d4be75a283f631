# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features of vLLM that are not supported: the rows, which each folder declares for its subject in
a module ``features``, and their composition."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig

V1, V2 = ("v1",), ("v2",)


class Feature(NamedTuple):
    """A feature that is not supported.

    Attributes:
        name: in messages, and in rows of overrides whose kernels it needs.
        asked: returns whether a configuration requests the feature: a string is the value to show,
            any other value counts as a boolean.
        of_model: whether ``asked`` is called only for a configuration with a model.
        runners: the model runners that do not support it. With ``V2`` an engine falls back to V1,
            unless it requests a feature that V1 does not support.
        fix: what the user can do; "" stands for another model runner if one has the feature, else
            for leaving the option out.
    """

    name: str
    asked: Callable[[VllmConfig], Any]
    of_model: bool = False
    runners: tuple[str, ...] = V1 + V2
    fix: str = ""


@functools.cache
def modules() -> tuple[ModuleType, ...]:
    """The modules ``features`` of all folders; each has rows, ``FEATURES``, and may have a function
    ``check`` that refuses a configuration in a message of its own."""
    root = Path(__file__).parents[1]
    paths = (path.relative_to(root) for path in sorted(root.glob("**/features.py")))
    folders = [".".join(path.parent.parts) for path in paths if path.parent.name != "config"]
    package = __package__.partition(".")[0]
    return tuple(importlib.import_module(f"{package}.{folder}.features") for folder in folders)


def rows() -> list[Feature]:
    """The rows of all folders."""
    return [row for module in modules() for row in module.FEATURES]


def asked(vllm_config: VllmConfig, runners: tuple[str, ...]) -> list[tuple[Feature, str]]:
    """The requested features that exactly these model runners do not support, each with the value
    that requests it, or ""."""
    found = []
    for row in rows():
        if row.runners != runners or (row.of_model and vllm_config.model_config is None):
            continue
        if value := row.asked(vllm_config):
            found.append((row, value if isinstance(value, str) else ""))
    return found
