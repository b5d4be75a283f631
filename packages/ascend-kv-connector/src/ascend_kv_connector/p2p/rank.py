# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Context that the producer and the consumer of a rank share, and streams for their threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from ascend_transfer.auth import CurveKeys


@dataclass(frozen=True)
class RankContext:
    """Rank ``index`` of the ``count`` ranks of instance ``engine``; PagedCache has shape,
    dtype and device of its KV cache.

    ``model`` and ``weights`` as in CacheInfo. ``host`` is where this rank listens.
    ``stream_context(event)`` is entered around all device work, in any thread: it runs after the
    event, if given, and has completed on exit. ``trusts(host)``: whether a peer's host, which names
    itself, may be contacted.
    """

    engine: str
    model: str
    index: int = 0
    count: int = 1
    weights: str = ""
    host: str = "127.0.0.1"
    keys: CurveKeys | None = None
    stream_context: Callable[..., AbstractContextManager] = nullcontext
    trusts: Callable[[str], bool] = lambda host: True


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
