# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The machine in a report: versions and the NPU's figures, nothing that
identifies it."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

DRIVER = Path("/usr/local/Ascend/driver/version.info")
INSTALLED = ("ascend_toolkit_install.info", "ascend_nnal_install.info", "version.cfg")


def _version_in(path: Path) -> str:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    match = re.search(
        r"^\s*(?:package_|runtime_running_|toolkit_running_)?version\s*=\s*\W*([\w.+-]+)",
        text,
        re.MULTILINE | re.IGNORECASE,
    )
    return match[1] if match else ""


def _cann() -> str:
    """CANN's version, from its installation; the emulator names itself."""
    try:
        function = ctypes.CDLL("libascendcl.so").aclsysGetVersionStr
        text = ctypes.create_string_buffer(256)
        if function(b"runtime", text) == 0 and text.value:
            return text.value.decode()
    except (OSError, AttributeError):
        pass
    home = Path(
        os.environ.get("ASCEND_HOME_PATH")
        or os.environ.get("ASCEND_TOOLKIT_HOME")
        or "/usr/local/Ascend/ascend-toolkit/latest"
    )
    paths = [path for name in INSTALLED for path in [home / name, *sorted(home.glob(f"*/{name}"))]]
    return next((version for version in map(_version_in, paths) if version), "unknown")


def emulated() -> bool:
    """Whether the NPU is emulated."""
    return "libascend_emulator.so" in Path("/proc/self/maps").read_text()


def clock() -> str:
    """Clock of this process's times: measured, emulated (by a CPU) or modelled."""
    if not emulated():
        return "measured"
    return os.environ.get("ASCEND_EMULATOR_TIME") or "emulated"


def _describe(options: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch_npu

    properties = torch.npu.get_device_properties(torch.npu.current_device())
    free, total = torch.npu.mem_get_info()
    kernels: dict[str, str] = {}
    if emulated():  # Results differ in the order of sums.
        if numerics := os.environ.get("ASCEND_EMULATOR_NUMERICS"):
            kernels["numerics"] = numerics
        ask = ctypes.CDLL("libascend_emulator.so").ascend_emulator_vector_unit
        ask.restype = ctypes.c_char_p
        kernels["vector_unit"] = ask().decode()
    facts = {
        "emulated": emulated(),
        "times": clock(),
        "soc": torch.npu.get_device_name(),
        "cann": _cann(),
        "driver": "none" if emulated() else _version_in(DRIVER) or "unknown",
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "machine": platform.machine(),
        "npus": torch.npu.device_count(),
        "memory_mib": total >> 20,
        "memory_used_percent": round(100 * (1 - free / total)),
        "cube_cores": getattr(properties, "cube_core_num", None),
        "vector_cores": getattr(properties, "vector_core_num", None),
        **kernels,
    }
    return {"outcome": "observed", "facts": facts}


PROGRAMS = {"environment": _describe}
