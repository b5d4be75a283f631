# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Causes of failures, carried from vLLM's engine and worker processes to the command whose last
line they are.

vLLM's command only says "See root cause above". A handler on vLLM's logger sees the errors that end
a process, and leaves one line for the parent process in the directory of the server's sockets
(``ascend_platform/process/sockets.py``).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import sys
import time
from pathlib import Path
from typing import Any

from ascend_platform.extension import installation

from ascend_cli.diagnostics import explanations

# vllm/v1/engine/core.py and vllm/v1/executor/multiproc_executor.py
FATAL = (
    "EngineCore failed to start.",
    "EngineCore encountered a fatal error.",
    "WorkerProc failed to start.",
    "WorkerProc failed.",
)
WORKER_DIED = "Worker proc %s died unexpectedly"
# vllm/v1/engine/core_client.py
CORE_DIED = "[shutdown] MPClient: engine core exited unexpectedly"
STATUS_WITHIN = 5.0
"""Seconds that a process may take from closing its files, by which vLLM knows that it ends, to
having an exit status."""
SIGNAL_WITHIN = 2.5
"""Seconds by which a signal that ends all processes may end one worker later than another, whose
end is an error for the first. An import may catch what the signal's handler raises; then the engine
core kills the worker after 1.5 seconds (ascend-patches)."""

_found: list[str] = []  # In this process or, at exit, by its child processes.


def watch() -> None:
    """Note the errors that end this process or its child processes. vLLM removes log handlers when
    it configures logging. The handler is the first, so that it can end the process before the error
    is printed."""
    log = logging.getLogger("vllm")
    if not any(isinstance(handler, _Handler) for handler in log.handlers):
        log.handlers.insert(0, _Handler(logging.WARNING))


def forget() -> None:
    """Remove what was left for an earlier process with this process id in a directory that the user
    keeps."""
    if file := _file(os.getpid()):
        file.unlink(missing_ok=True)


def cause() -> str:
    """Why this process or a child process has failed, or "". The first cause that is explained,
    else the first."""
    file = _file(os.getpid())
    if not _found and file and file.is_file():
        lines = [line.split(" ", 1) for line in file.read_text(errors="replace").splitlines()]
        file.unlink(missing_ok=True)
        _found.extend(text for _, text in sorted(lines, key=lambda line: line[0]))
    return _found[0] if _found else ""


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.msg in FATAL and record.msg.startswith("WorkerProc"):
            # The handler of a signal raises SystemExit here (WorkerProc.worker_main).
            time.sleep(SIGNAL_WITHIN)
        # vLLM has not configured logging yet
        if logging.lastResort and logging.getLogger("vllm").handlers == [self]:
            logging.lastResort.handle(record)
        with contextlib.suppress(Exception):
            error = record.exc_info[1] if record.exc_info else None
            message = str(record.msg)
            if error and message in FATAL:
                known = explanations.explain(error) or cause()
                name = multiprocessing.current_process().name
                _report(known or f"{name}: {explanations.describe(error)}", not known)
            elif message.startswith(WORKER_DIED) and isinstance(record.args, tuple):
                process = _of_caller("proc")
                status = _status(process) if process else record.args[1]
                _found.insert(0, explanations.death(str(record.args[0]), status))  # type: ignore[arg-type]
            elif message.startswith(CORE_DIED):
                _found.extend(_dead_cores())


def _report(line: str, unexplained: bool) -> None:
    """Leave a line for the parent process; several child processes may do so at a time."""
    if file := _file(os.getppid()):
        with file.open("a") as out:
            out.write(f"{int(unexplained)} {line}\n")


def _file(reader: int) -> Path | None:
    """File for a process; None without a directory in which others cannot plant it."""
    directory = os.environ.get("VLLM_RPC_BASE_PATH", "")
    return Path(directory, f"failure-{reader}") if installation.is_private(directory) else None


def _dead_cores() -> list[str]:
    """Engine cores that a signal has ended; the frame of vLLM's
    ``monitor_engine_cores``, which logs it, contains them."""
    manager = _of_caller("engine_manager")
    ended = [(process.name, _status(process)) for process in (manager.processes if manager else [])]
    return [explanations.death(name, status) for name, status in ended if (status or 0) < 0]


def _of_caller(variable: str) -> Any:
    """A local variable of the function that logs the record, or None."""
    frame = sys._getframe()
    while frame and variable not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_locals[variable] if frame else None


def _status(process: Any) -> int | None:
    """The exit status of a process, also of one that is ending. None if it runs."""
    deadline = time.monotonic() + STATUS_WITHIN
    is_ending = multiprocessing.connection.wait([process.sentinel], timeout=0)
    while process.exitcode is None and is_ending and time.monotonic() < deadline:
        time.sleep(0.05)
    return process.exitcode
