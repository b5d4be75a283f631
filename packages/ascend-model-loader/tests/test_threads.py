# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A weight server and a client while the process can start no thread, as at a limit of processes."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from ascend_model_loader.wire import PeerError
from harness.weights.peers import as_bytes, room, weights


def refuse_threads(patch: pytest.MonkeyPatch, refused: Callable[[], bool]) -> None:
    """Fail the starts of the wheel's threads that are to be refused."""
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name.startswith("weights") and refused():
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", start_or_fail)


def test_server_accepts_after_it_could_start_no_thread(serving: Any, caplog: Any) -> None:
    served = serving(timeout=3.0, connect_timeout=3.0)
    main = threading.current_thread()
    with pytest.MonkeyPatch.context() as patch:
        refuse_threads(patch, lambda: threading.current_thread() is not main)
        for _ in range(3):
            with pytest.raises(PeerError):
                served.fetch(room(), connections=1)
    assert [each.message for each in caplog.records if "ulimit -u" in each.message] == [
        "weight connections are closed: no thread can be started; fix: raise the limit of processes"
        " and threads (ulimit -u, pids.max)"
    ]
    served.fetch(into := room())
    assert as_bytes(into) == as_bytes(weights())


@pytest.mark.parametrize("starts", [0, 1])
def test_client_uses_the_threads_that_it_can_start(serving: Any, starts: int) -> None:
    """None of them goes on after a fetch has failed, when weights are loaded from disk."""
    served, into, left = serving(), room(), [True] * starts
    main = threading.current_thread()
    with pytest.MonkeyPatch.context() as patch:
        refuse_threads(
            patch, lambda: threading.current_thread() is main and not (left and left.pop())
        )
        if starts:
            served.fetch(into, connections=4)
        else:
            with pytest.raises(PeerError, match=r"can't start new thread; fix: raise the limit"):
                served.fetch(into, connections=4)
    assert as_bytes(into) == as_bytes(weights() if starts else room())
