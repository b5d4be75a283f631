# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Context that the producer and the consumer of a rank share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ascend_platform.transfer.auth import CurveKeys


@dataclass(frozen=True)
class RankContext:
    """Rank ``index`` of the ``count`` ranks of instance ``engine``; shape, dtype and device of
    its KV cache are PagedCache's.

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
