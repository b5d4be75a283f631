"""For tests that need more NPUs than the one that the test session has."""

import os
import subprocess
import sys

import pytest


def run(
    npus: int, *command: str, memory: str = "1GiB", timeout: float = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command where this many NPUs are, output captured.

    They are emulated if those of the session are; otherwise the test is skipped where there are not as many. `memory` is what
    each emulated one has; a variable with the value "" is taken out.
    """
    environ = {name: value for name, value in (os.environ | variables).items() if value}
    if "ASCEND_EMULATOR_NPUS" in environ:
        options = ["--npus", str(npus), "--soc", environ["ASCEND_EMULATOR_SOC"], "--memory", memory]
        command = (sys.executable, "-m", "ascend_emulator.cli", "run", *options, "--", *command)
    elif (found := _device_count()) < npus:
        pytest.skip(f"needs {npus} NPUs; there are {found}")
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout, check=False)


def _device_count() -> int:
    import torch

    return torch.npu.device_count()
