# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Triton on emulated NPUs: triton-ascend compiles a kernel as for an NPU down to linalg, and this
package compiles that for this processor.

``install()`` lets Triton find the emulator's driver. It imports nothing: a finder acts when a
program imports Triton.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

MODULE = "triton.backends"
PASSES = "ascendnpuir"  # Of ascendnpu-ir, which only the extra requires.


class _Loader(importlib.abc.Loader):
    """Triton's own loader of the module, and then the emulator's backend."""

    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        replace(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader)
        return spec


def replace(backends: ModuleType) -> None:
    """Replace the backend of triton-ascend; another Triton stays as it is."""
    if "ascend" not in backends.backends:
        return
    from ascend_emulator.triton import driver

    backends.backends["ascend"] = driver.backend(backends.backends["ascend"])


def install() -> None:
    """Make the driver of the emulator the one of Triton in this process, with
    ascend-emulator[triton]."""
    if importlib.util.find_spec(PASSES) is None:
        return
    if MODULE in sys.modules:
        replace(sys.modules[MODULE])
    elif not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
