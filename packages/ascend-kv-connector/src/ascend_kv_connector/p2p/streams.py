# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Streams of the connector's threads, and events of the engine's stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def record_event() -> Any:
    """Event after all work that was enqueued on the current stream."""
    event = torch.npu.Event()
    event.record()
    return event


_of_thread = threading.local()


@contextmanager
def private_stream(device: torch.device, behind: Any = None) -> Iterator[None]:
    """Run work on this thread's private stream after an event, if given; synchronize on exit, also
    after an error: what was enqueued before it uses memory that the caller then gives away."""
    torch.npu.set_device(device)
    if not hasattr(_of_thread, "stream"):
        _of_thread.stream = torch.npu.Stream(device)
    stream = _of_thread.stream
    try:
        with torch.npu.stream(stream):
            if behind is not None:
                stream.wait_event(behind)
            yield
    finally:
        stream.synchronize()
