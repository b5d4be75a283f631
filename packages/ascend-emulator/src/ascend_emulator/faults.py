"""Faults on demand: out of memory, a device error, a stream that hangs, a collective that times out or loses its link.

In this process by ``inject`` and ``clear``; from outside by ``ascend-emulator run --fault aclrtMalloc@3=oom`` or the
environment variable ``ASCEND_EMULATOR_FAULTS``, several separated by semicolons.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from ascend_emulator import build

KINDS = ("oom", "ecc", "uce", "hang", "timeout", "drop", "error=CODE")
_FORM = re.compile(r"[A-Za-z]\w*@[1-9]\d{0,8}\+?=(oom|ecc|uce|hang|timeout|drop|error=[1-9]\d{0,8})")


def checked(fault: str) -> str:
    """The fault, which is ``NAME@N=KIND`` or, for every call from the Nth on, ``NAME@N+=KIND``.

    Raises:
        ValueError: it has another form.
    """
    if not _FORM.fullmatch(fault):
        raise ValueError(f"{fault!r} is no fault; write NAME@N=KIND, such as aclrtMalloc@3=oom; kinds: {', '.join(KINDS)}")
    return fault


def _library() -> ctypes.CDLL:
    name = f"lib{build.CORE}.so"
    if name not in Path("/proc/self/maps").read_text():
        raise RuntimeError("no NPU is emulated in this process; ascend_emulator.activate() or `ascend-emulator run` comes first")
    return ctypes.CDLL(name)


def inject(name: str, nth: int = 1, kind: str = "oom", repeat: bool = False) -> None:
    """Let an entry point of CANN fail.

    Args:
        name: the entry point, such as ``aclrtMalloc`` or ``aclnnMatmul``; or a word for several: ``memory`` (device memory is
            allocated), ``stream`` (a task is put on a stream), ``collective`` (a collective or point-to-point call).
        nth: at which call, counted from now on.
        kind: ``oom``, ``ecc``, ``uce`` or ``error=CODE``, which the call returns; ``hang``, for an operator, a collective or
            ``stream``: its task never ends; ``timeout`` or ``drop``, for collectives.
        repeat: whether it fails at every later call too. Without, what is tried again succeeds: torch-npu allocates again after
            it has emptied its cache.

    Raises:
        ValueError: there is no such entry point, or it cannot fail like that.
        RuntimeError: no NPU is emulated in this process.
    """
    library = _library()
    fault = checked(f"{name}@{nth}{'+' * repeat}={kind}")
    if library.ascend_emulator_inject(fault.encode()):
        library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        raise ValueError(library.aclGetRecentErrMsg().decode().partition("inject: ")[2])


def clear() -> None:
    """Forget all faults, those of the environment too."""
    _library().ascend_emulator_clear_faults()
