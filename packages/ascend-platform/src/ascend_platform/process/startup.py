# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Start-up of vLLM's own commands and of the processes that vLLM spawns, called by
``ascend_platform.pth`` as Python starts."""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

SWITCH = "VLLM_ASCEND_STARTUP_CHECKS"
"""Environment variable; with "0" diagnostics do not start, and garbage is collected as Python
does."""

IMPORTING = 100_000, 20, 100
"""Thresholds of the garbage collector while vLLM is imported, which makes a million objects that
stay."""

AGAIN = 0.05  # Seconds after which a dropped exit is raised again.

_thresholds: tuple[int, int, int] | None = None  # to be restored


def run() -> None:
    """Start diagnostics, and collect garbage rarely, if vLLM is the program that this process
    runs."""
    if os.environ.get(SWITCH) != "0" and runs_vllm(sys.orig_argv):
        from ascend_platform.process import diagnostics

        skip_last_collection()
        diagnostics.start_command()
        # It measures, and configures no engine for collect_garbage_as_before().
        if "bench" not in sys.orig_argv:
            collect_garbage_rarely()


def run_child() -> None:
    """Prepare a process that multiprocessing spawns below a process of vLLM, which handles ctrl-C
    for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get(SWITCH) != "0":
        sys.unraisablehook = _exit_again
        collect_garbage_rarely()


def _exit_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Python's hook, but after the SystemExit of a signal's handler the process still ends.

    The signal may arrive while a ``__del__`` or a callback of a weak reference runs, as in each
    import, and Python drops what these raise. vLLM's handler (``multiproc_executor.py``) raises for
    the first signal only: a worker would go on, and report the end of the other ranks as an error.
    """
    if unraisable.exc_type is not SystemExit:
        sys.__unraisablehook__(unraisable)
    elif threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit_once)
        timer = threading.Timer(AGAIN, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()


def _exit_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, _ignore)
    raise SystemExit


def _ignore(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, silent about a signal that arrived before."""


def collect_garbage_rarely() -> None:
    """Raise the collector's thresholds: by Python's own a quarter of the CPU time of vLLM's imports
    is garbage collection."""
    global _thresholds
    if _thresholds is None and gc.get_threshold()[0]:
        _thresholds = gc.get_threshold()
        gc.set_threshold(*IMPORTING)


def collect_garbage_as_before() -> None:
    """Restore the thresholds, and leave what was imported out of all later collections; vLLM asks
    for many while it starts."""
    global _thresholds
    if _thresholds is not None:
        gc.freeze()
        gc.set_threshold(*_thresholds)
        _thresholds = None


def skip_last_collection() -> None:
    """Let the last garbage collection of this process, at exit, leave out all objects: it takes 1
    to 2 s.

    Triton's extension (nanobind) would report such objects as leaks, after all other lines.
    """
    atexit.register(lambda: (gc.unfreeze if "triton" in sys.modules else gc.freeze)())


def runs_vllm(command: Sequence[str]) -> bool:
    """Whether a command of Python is ``vllm …`` or ``python -m vllm…``, with or without options of
    Python."""
    words = [word for word in command[1:] if word == "-m" or not word.startswith("-")]
    if words[:1] == ["-m"]:
        return words[1:] != [] and words[1].split(".")[0] == "vllm"
    return words != [] and "-c" not in command[1:2] and os.path.basename(words[0]) == "vllm"
