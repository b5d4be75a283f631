# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Queries that wait for a resource of the server, answered in order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from ascend_transfer.messages import Message, Refused

Key = tuple[Any, ...]

MAX_WAITING = 4096
"""Queries that may wait; a peer's further ones are refused."""

INDEPENDENT_SECONDS = 0.05
"""Interval at which independent queries are tried again if nothing is known to have changed."""


class BusyError(Exception):
    """A query cannot be answered before a resource is free: it waits under ``key``, which has one
    query at a time.

    An ``independent`` query waits for something else than a buffer: no other query waits for it.
    """

    def __init__(self, key: Key, cause: str, independent: bool = False) -> None:
        super().__init__(cause)
        self.key, self.independent = key, independent


class ReceivedQuery(NamedTuple):
    """``reply`` sends the reply to the query's sender."""

    query: Message
    reply: Callable[[Message], None]


@dataclass
class Entry:
    """An entry of the queue. ``received`` is None from when the sender was told to repeat its query
    until it does, or ``until``."""

    received: ReceivedQuery | None
    until: float
    independent: bool = False


class QueryQueue:
    """Queries by arrival. After ``seconds`` a sender is told to repeat its query, so that it knows
    that this side is alive; its position is kept for as long again. ``changed`` is set, in any
    thread, when an independent query may be answered."""

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self.changed, self._next_try = False, 0.0
        self._entries: dict[Key, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def is_next(self, key: Key) -> bool:
        """Whether no earlier query waits."""
        for earlier, entry in self._entries.items():
            if earlier == key:
                return True
            if entry.received is not None and not entry.independent:
                return False
        return True

    def add(self, busy: BusyError, received: ReceivedQuery) -> None:
        """Let a query wait; it replaces an earlier one with the same key."""
        key, cause = busy.key, str(busy)
        if key not in self._entries and len(self._entries) >= MAX_WAITING:
            refused = Refused("deadline", f"{cause}, and {MAX_WAITING} queries wait", again=True)
            received.reply(refused)
            return
        entry = self._entries.setdefault(key, Entry(None, 0.0, busy.independent))
        entry.received, entry.until = received, self._clock() + self._seconds

    def remove(self, matches: Callable[[Key], bool]) -> None:
        """Remove the queries of senders that no longer wait."""
        self._entries = {key: entry for key, entry in self._entries.items() if not matches(key)}

    def serve(self, answer: Callable[[Message], Message]) -> None:
        """Answer queries in their order, until one has to wait on. Independent ones are tried in
        any case."""
        blocked, try_independent = "", self.changed or self._clock() >= self._next_try
        if try_independent:
            self.changed, self._next_try = False, self._clock() + INDEPENDENT_SECONDS
        for key, entry in list(self._entries.items()):
            received, expired = entry.received, entry.until <= self._clock()
            if received is None:
                if expired:
                    del self._entries[key]
                continue
            cause = blocked
            if (try_independent or expired) if entry.independent else not blocked:
                try:
                    reply = answer(received.query)
                except BusyError as error:
                    cause = str(error)
                    blocked = blocked or ("" if error.independent else cause)
                else:
                    self._entries.pop(key, None)
                    received.reply(reply)
                    continue
            if expired:
                entry.received, entry.until = None, self._clock() + self._seconds
                received.reply(Refused("deadline", cause, again=True, queued=True))
