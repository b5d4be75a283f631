# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""SIGINT and SIGTERM do not end an engine core before its model is loaded."""

import functools
import multiprocessing
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PATIENCE = 1.5  # Seconds that workers have to exit by themselves.


def end_while_starting(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> None:
        handlers: dict[int, Any] = {
            number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
        }
        theirs = {number: handler for number, handler in handlers.items() if _is_of_vllm(handler)}
        for number, handler in theirs.items():
            signal.signal(number, functools.partial(_end, handler))
        original(*args, **kwargs)
        for number, handler in theirs.items():
            signal.signal(number, handler)

    return replacement


def _is_of_vllm(handler: Any) -> bool:
    main = threading.current_thread() is threading.main_thread()
    return main and "run_engine_core" in getattr(handler, "__qualname__", "")


def _end(handler: Callable[..., Any], number: int, frame: FrameType | None) -> None:
    handler(number, frame)
    # After a ctrl-C, which reaches all processes, the main process sends SIGTERM. Not SIG_IGN: if
    # both have arrived, Python reports the second one as an error.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _ignore)
    timer = threading.Timer(PATIENCE, _kill_workers)
    timer.daemon = True
    timer.start()
    raise SystemExit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _kill_workers() -> None:
    """End workers that wait in C++, such as for another rank, and do not handle signals. The main
    process waits for 5 seconds."""
    for process in multiprocessing.active_children():
        process.kill()
