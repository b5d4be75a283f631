# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fault injection: out of memory, device errors, hanging streams, collectives that time out or lose
their connection.

In this process by ``inject`` and ``clear``; for other programs by ``ascend-emulator run --fault
aclrtMalloc@3=oom`` or the environment variable ``ASCEND_EMULATOR_FAULTS``, separated by semicolons.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from ascend_emulator import build

KINDS = ("oom", "ecc", "uce", "hang", "timeout", "drop", "error=CODE")
_FORM = re.compile(
    r"[A-Za-z](?:\w|::)*@[1-9]\d{0,8}\+?=(oom|ecc|uce|hang|timeout|drop|error=[1-9]\d{0,8})"
)


def checked(fault: str) -> str:
    """Check the syntax of a fault: ``NAME@N=KIND`` or, for all calls from the Nth on,
    ``NAME@N+=KIND``.

    Raises:
        ValueError: invalid syntax.
    """
    if not _FORM.fullmatch(fault):
        raise ValueError(
            f"invalid fault {fault!r}; use NAME@N=FAULT, such as aclrtMalloc@3=oom; faults:"
            f" {', '.join(KINDS)}"
        )
    return fault


def loaded_library() -> ctypes.CDLL:
    """The emulator's library in this process.

    Raises:
        RuntimeError: no NPU is emulated in this process.
    """
    name = f"lib{build.CORE}.so"
    if name not in Path("/proc/self/maps").read_text():
        raise RuntimeError(
            "no NPU is emulated in this process; call ascend_emulator.activate() or use"
            " `ascend-emulator run`"
        )
    return ctypes.CDLL(name)


def inject(name: str, nth: int = 1, kind: str = "oom", repeat: bool = False) -> None:
    """Make calls of a CANN entry point fail.

    Args:
        name: the entry point, such as ``aclrtMalloc`` or ``aclnnMatmul``; or a group: ``memory``
            (allocations of device memory), ``stream`` (tasks submitted to a stream), ``collective``
            (collective and point-to-point calls).
        nth: number of the failing call, counted from now on.
        kind: ``oom``, ``ecc``, ``uce`` or ``error=CODE``, which the call returns; ``hang``, for an
            operator, a collective or ``stream``: its task never ends; ``timeout`` or ``drop``, for
            collectives.
        repeat: whether all later calls fail too. Otherwise retries succeed: torch-npu retries an
            allocation after emptying its cache.

    Raises:
        ValueError: unknown entry point, or a fault that it does not support.
        RuntimeError: no NPU is emulated in this process.
    """
    library = loaded_library()
    fault = checked(f"{name}@{nth}{'+' * repeat}={kind}")
    if library.ascend_emulator_inject(fault.encode()):
        library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        raise ValueError(library.aclGetRecentErrMsg().decode().partition("inject: ")[2])


def clear() -> None:
    """Remove all faults, including those of the environment."""
    loaded_library().ascend_emulator_clear_faults()
