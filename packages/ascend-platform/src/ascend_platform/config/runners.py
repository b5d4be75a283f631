# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The model runners of this version: V2, and V1 until its folder is deleted. Only that folder
imports V1's modules by name."""

import functools
import importlib
import importlib.util
from types import ModuleType

from ascend_platform import fingerprint

_FOLDERS = "ascend_platform.runners"


def module(version: str, name: str) -> ModuleType:
    """A module of a runner's folder.

    Args:
        version: ``v1`` or ``v2``.
    """
    return importlib.import_module(f"{_FOLDERS}.{version}.{name}")


@functools.cache
def has_v1() -> bool:
    """Whether this version, and the installed vLLM, have the V1 runner."""
    vllm_runner = fingerprint.module_source("vllm.v1.worker.gpu_model_runner")
    return vllm_runner is not None and importlib.util.find_spec(f"{_FOLDERS}.v1") is not None
