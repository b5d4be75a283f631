# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The engine core waits forever for a worker on another machine that has died."""

import time
from collections.abc import Callable
from typing import Any

from ascend_patches import patch

PATIENCE = 1.0  # Seconds between two checks of the executor.


@patch(
    target="vllm.distributed.device_communicators.shm_broadcast:MessageQueue.dequeue",
    scope="engine",
    vllm=">=0.31,<0.34",
    reason=(
        "the engine waits forever for outputs of a worker on another machine that has died, with"
        " Ray or `--nnodes`"
    ),
    upstream=(
        "no issue is known; MessageQueue.recv waits without end, and MessageQueue.shutdown only ends local readers"
    ),
    remove_when="MessageQueue.shutdown ends a remote reader that waits",
    fingerprint=["8bdebbfa9813", "5c6d1503c1db"],
)
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
