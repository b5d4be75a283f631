# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Settings of all tests: the distribution to processes, garbage collection around imports, and
vLLM's cache."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["harness.fixtures", "harness.scheduling"]

# Two versions of vLLM overwrite each other's model infos, and each miss costs an import of vLLM in
# a process of its own.
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "vllm-cache"))
# The report of each engine's start measures the processor in a process of its own.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

gc.disable()  # While the tests and the modules under test are imported: some million objects.


def pytest_collection_finish() -> None:
    gc.freeze()  # Otherwise a collection takes a third of a second.
    gc.enable()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test computes with the same numbers in each run, whatever ran before it, so that one with a
    tight bound passes or fails for a reason."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(0)
        # Otherwise the NPU's generators would open the device.
        if (npu := getattr(torch, "npu", None)) is not None and npu.is_initialized():
            npu.manual_seed_all(0)


@pytest.fixture(autouse=True)
def processes_of_engines() -> Iterator[None]:
    """vLLM's configuration of an external launcher sets this variable for the whole process, and
    programs that later tests start would inherit it."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    value = os.environ.get(name)
    yield
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@pytest.fixture(autouse=True)
def plugins_of_this_process() -> Iterator[None]:
    """Plugins that vLLM loads in a test with a registry of components of its own are loaded again
    by the next test."""
    yield
    plugins, registry = (
        sys.modules.get(name) for name in ("vllm.plugins", "ascend_platform.plugins.registry")
    )
    # The platform's registration asks ascend-patches by itself.
    early = {"ascend-platform", "ascend-patches"}
    if plugins and registry and registry._statuses.keys() <= early:
        plugins.plugins_loaded = False
