# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Libraries and memory of this machine, found without importing torch, torch_npu or vLLM, and the
commands that set up CANN and the driver."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from pathlib import Path

from ascend_platform.extension import installation


def has_library(stem: str) -> bool:
    """Whether LD_LIBRARY_PATH or the linker's cache has a library with this prefix, such as
    ``libopapi``."""
    directories = [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    cache = Path("/etc/ld.so.cache")
    return any(True for directory in directories for _ in directory.glob(f"{stem}*.so*")) or (
        cache.is_file() and stem.encode() in cache.read_bytes()
    )


def missing_libraries(torch_npu: Path) -> tuple[list[str], str]:
    """The libraries that torch_npu needs, directly or indirectly, and the linker does not find; and
    other output of ldd.

    Raises:
        FileNotFoundError: ldd is not installed.
    """
    command = ["ldd", str(torch_npu / "lib" / "libtorch_npu.so")]
    done = subprocess.run(command, env=_with_torch(), capture_output=True, text=True, timeout=20)
    missing = re.findall(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE)
    other = " ".join((done.stdout + done.stderr).split()) if done.returncode else ""
    return sorted(set(missing)), other


def set_env() -> str:
    """The command that sets up CANN's environment, if an installation is found, else how to install
    it."""
    roots = [Path("/usr/local/Ascend"), Path.home() / "Ascend"]
    names = "ascend-toolkit", "cann", "nnae"
    for path in (root / name / "set_env.sh" for root in roots for name in names):
        if path.is_file():
            return f"source {path}"
    without = "on a machine without NPUs put `ascend-emulator run --` before the command"
    return f"install CANN and source its set_env.sh; {without}"


def driver_fix() -> str:
    """The fix if the driver's library does not answer."""
    libraries = installation.DRIVER / "lib64" / "driver"
    if (libraries / "libascend_hal.so").is_file():
        paths = f"{libraries}:{libraries.parent / 'common'}:$LD_LIBRARY_PATH"
        return f"export LD_LIBRARY_PATH={paths}, then look at npu-smi info"
    mount = "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver"
    return f"install the NPU driver, or mount it into the container ({mount})"


def free_memory() -> int:
    """Bytes that this process can allocate: the least of available memory, the container's limit
    and the process's limit."""
    available = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
    limits = [int(available[1]) << 10] if available else []
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    if own != resource.RLIM_INFINITY:
        limits.append(own)
    most, now = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if most.is_file() and now.is_file() and (most_text := most.read_text().strip()) != "max":
        limits.append(int(most_text) - int(now.read_text()))
    return min(limits)


def _with_torch() -> dict[str, str]:
    """This environment with torch's libraries on LD_LIBRARY_PATH, as torch_npu is loaded after
    torch."""
    torch = installation.package("torch")
    parts = [os.environ.get("LD_LIBRARY_PATH", ""), str(torch / "lib") if torch else ""]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, parts))}
