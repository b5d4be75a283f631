# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The emulator's check of ``vllm-ascend doctor``, an entry point of group
``vllm_ascend.checks``."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def check(options: Any = None, devices: Path = Path("/dev")) -> Iterator[tuple[str, str, str, str]]:
    """Warn where programs use emulated NPUs although the machine has real ones."""
    real = sorted(
        path.name
        for path in devices.glob("davinci*")
        if path.name.removeprefix("davinci").isdigit()
    )
    if real and "ASCEND_EMULATOR_NPUS" in os.environ:
        state = (
            f"programs use the emulator, and this machine has {len(real)} NPUs"
            f" ({devices / real[0]})"
        )
        fix = (
            "start them without ascend-emulator run, in a shell without its LD_LIBRARY_PATH and"
            " ASCEND_EMULATOR_ variables"
        )
        yield "emulated NPUs", "warn", state, fix
