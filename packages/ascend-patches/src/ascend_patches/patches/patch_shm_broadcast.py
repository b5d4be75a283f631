# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The engine core waits forever for a worker on another machine that has died."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 1.0  # Seconds between two checks of the executor.


def dequeue(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(self: Any, timeout: float | None = None, *args: Any, **kwargs: Any) -> Any:
        if self._is_remote_reader and not self._is_local_reader:
            deadline = None if timeout is None else time.monotonic() + timeout
            while not self.remote_socket.poll(1000 * _patience(deadline)):
                if self.shutting_down:
                    raise RuntimeError("cancelled")  # as a local reader does
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError
            timeout = None if timeout is None else 0
        return original(self, timeout, *args, **kwargs)

    return replacement


def _patience(deadline: float | None) -> float:
    return PATIENCE if deadline is None else min(PATIENCE, max(0.0, deadline - time.monotonic()))
