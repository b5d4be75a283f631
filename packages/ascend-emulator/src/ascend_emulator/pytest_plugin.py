# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""pytest plugin: ``pytest --npus 2``, or ``ascend_emulator_npus = 1`` in the configuration file.

No NPU is emulated without one of the two.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from ascend_emulator.activation import STRICT

LINE = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, on the command line and in the configuration file."""
    group = parser.getgroup("ascend-emulator")
    group.addoption(
        "--npus", type=int, default=None, help="run the tests with this many emulated NPUs"
    )
    group.addoption("--soc", default=None, help="chip of the emulated NPUs")
    group.addoption("--npu-strict", action="store_true", help=STRICT)
    group.addoption(
        "--npu-memory", default=None, help="device memory of each emulated NPU, such as 2GiB"
    )
    parser.addini("ascend_emulator_npus", "emulated NPUs to run the tests with", default="0")
    parser.addini("ascend_emulator_memory", "device memory of each emulated NPU", default="")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Activate the emulator before a conftest or test module imports torch."""
    from ascend_emulator.activation import DEFAULT_SOC, activate, parse_size, set_strict
    from ascend_emulator.build import BuildError

    chosen = early_config.known_args_namespace
    configured = early_config.getini("ascend_emulator_npus")
    if chosen.npus is None and not configured.isdecimal():
        raise pytest.UsageError(
            f"ascend_emulator_npus is {configured!r}; supported: a number of NPUs, 0 for none"
        )
    npus = chosen.npus if chosen.npus is not None else int(configured)
    if not npus:
        return
    if chosen.npu_strict:
        set_strict(os.environ)
    memory = chosen.npu_memory or early_config.getini("ascend_emulator_memory")
    capture = early_config.pluginmanager.getplugin("capturemanager")
    try:
        # compiling takes minutes, and reports progress
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            early_config.stash[LINE] = activate(
                npus, chosen.soc or DEFAULT_SOC, parse_size(memory) if memory else None
            )
    except (BuildError, RuntimeError, ValueError) as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str:
    """Report the emulated NPUs, because pytest captures the output of activate()."""
    return config.stash.get(LINE, "")
