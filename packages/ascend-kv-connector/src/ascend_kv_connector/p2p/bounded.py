# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Memory of requests and of early messages, both limited in number."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

MAX_REMEMBERED = 4096
"""Requests that are remembered after their end or before their start, for messages that arrive out
of order."""


class BoundedDict(dict[Any, Value]):
    """Dictionary; beyond ``most`` entries the oldest is dropped."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Any, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]


class EarlyMessages(Generic[Value]):
    """Messages for requests that are not here yet: ``most`` of them, for ``seconds``."""

    def __init__(self, most: int, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._most, self._seconds, self._clock = most, seconds, clock
        self._kept: dict[str, tuple[Value, float]] = {}  # the oldest first

    def add(self, request: str, value: Value) -> bool:
        """Keep the latest message for a request; whether it could be kept."""
        now = self._clock()
        self._kept.pop(request, None)
        while self._kept and now - next(iter(self._kept.values()))[1] > self._seconds:
            del self._kept[next(iter(self._kept))]
        if len(self._kept) >= self._most:
            return False
        self._kept[request] = value, now
        return True

    def pop(self, request: str) -> Value | None:
        """The message for a request that is here now."""
        value, _ = self._kept.pop(request, (None, 0.0))
        return value
