# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""After a call that fails or times out on one of several ranks, each later call gets the reply to
an earlier one."""

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

_counts: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
"""Numbers of requested and of read replies, by queue."""


def collective_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        **aggregators: Any,
    ) -> Any:
        # Like collective_rpc: every rank replies to a call with an aggregator.
        rank = None if any(aggregators.values()) else unique_reply_rank
        return original(
            _Call(self, rank),
            method,
            timeout,
            args,
            kwargs,
            non_block,
            unique_reply_rank,
            **aggregators,
        )

    return replacement


class _Call:
    """An executor whose queues of replies skip those to earlier calls."""

    def __init__(self, executor: Any, rank: int | None) -> None:
        self._executor, self._rank = executor, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    @functools.cached_property
    def response_mqs(self) -> list[Any]:
        """One queue for each rank; collective_rpc reads it after it has sent the call, hence
        replies will come."""
        queues = enumerate(self._executor.response_mqs)
        return [_Reply(queue) if self._rank in (None, rank) else None for rank, queue in queues]


class _Reply:
    """A rank's reply to one call. Replies arrive in the order of the calls, so that counting
    identifies them."""

    def __init__(self, queue: Any) -> None:
        self._queue, self._count = queue, _counts.setdefault(queue, [0, 0])
        self._count[0] += 1
        self._number = self._count[0]

    def dequeue(self, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            reply = self._queue.dequeue(
                timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
            )
            self._count[1] += 1
            if self._count[1] == self._number:
                return reply
