# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Programs whose main module the processes of an engine cannot import, as multiprocessing's start
method spawn requires."""

import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

ENGINES = "vllm.v1.engine.llm_engine", "vllm.v1.engine.async_llm"
"""Modules whose functions configure an engine and then start its processes."""

GUARDS = "__name__", "current_process", "parent_process"
"""Names by which a main module finds out that it is imported by a child process."""


def check() -> None:
    """Refuse an engine that a program creates while its main module runs without a guard, or that
    is read from stdin.

    Each process that multiprocessing spawns imports the main module, and would create an engine
    itself.

    Raises:
        RuntimeError: what to write, in one line; pydantic, which calls this, would add lines to a
            RefusedError.
    """
    from vllm import envs

    main = sys.modules["__main__"]
    # None in a notebook, an interactive session, and with -c.
    file = getattr(main, "__file__", None)
    frames = list(_stack())
    is_engine = any(_module(frame) in ENGINES for frame in frames)
    if not file or not envs.VLLM_ENABLE_V1_MULTIPROCESSING or not is_engine:
        return
    if not os.path.isfile(file):
        raise RuntimeError(
            f"the program is read from {file}, which the processes of an engine cannot import; fix:"
            " save it to a file"
        )
    if not any(
        frame.f_globals is vars(main) and frame.f_code.co_name == "<module>" for frame in frames
    ):
        return
    with open(file, errors="replace") as source:
        if not any(guard in line for line in source for guard in GUARDS):
            found = (
                f"{file} creates an engine when it is imported, as each process of the engine does"
            )
            fix = 'put its code below: if __name__ == "__main__":'
            raise RuntimeError(f"{found}; fix: {fix}")


def _module(frame: FrameType) -> Any:
    return frame.f_globals.get("__name__")


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
