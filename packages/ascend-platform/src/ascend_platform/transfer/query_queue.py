# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Queries that wait for a resource of the server, answered in order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from ascend_platform.transfer.messages import Message, Refused

Place = tuple[Any, ...]

MAX_WAITING = 4096
"""Queries that may wait; a peer's further ones are refused."""


ALONE_SECONDS = 0.05
"""Interval at which independent queries are polled if no change is known."""


class BusyError(Exception):
    """A query cannot be answered before another one's resource is free: it waits under ``place``,
    one query at a time.

    One that waits ``alone`` waits for something else than a buffer: no other query waits for it.
    """

    def __init__(self, place: Place, cause: str, alone: bool = False) -> None:
        super().__init__(cause)
        self.place, self.alone = place, alone


class Asked(NamedTuple):
    """A received query: ``reply`` sends the reply to its sender."""

    query: Message
    reply: Callable[[Message], None]


@dataclass
class Waiting:
    """A place in the queue. ``asked`` is None from when the sender was told to repeat its query
    until it does, or ``until``."""

    asked: Asked | None
    until: float
    alone: bool = False


class QueryQueue:
    """Places by arrival. After ``seconds`` a sender is told to repeat its query, so that it knows
    that this side is alive; the place is kept for as long again. ``changed`` is set, in any thread,
    when an independent query may be answered."""

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self.changed, self._ask_alone_at = False, 0.0
        self._places: dict[Place, Waiting] = {}

    def __len__(self) -> int:
        return len(self._places)

    def is_next(self, place: Place) -> bool:
        """Whether no earlier query waits."""
        for earlier, waiting in self._places.items():
            if earlier == place:
                return True
            if waiting.asked is not None and not waiting.alone:
                return False
        return True

    def add(self, busy: BusyError, asked: Asked) -> None:
        """Let a query wait; it replaces an earlier one in the same place."""
        place, cause = busy.place, str(busy)
        if place not in self._places and len(self._places) >= MAX_WAITING:
            asked.reply(Refused("deadline", f"{cause}, and {MAX_WAITING} queries wait", again=True))
            return
        waiting = self._places.setdefault(place, Waiting(None, 0.0, busy.alone))
        waiting.asked, waiting.until = asked, self._clock() + self._seconds

    def remove(self, matches: Callable[[Place], bool]) -> None:
        """Forget the queue positions of senders that no longer wait."""
        self._places = {
            place: waiting for place, waiting in self._places.items() if not matches(place)
        }

    def serve(self, answer: Callable[[Message], Message]) -> None:
        """Answer queries in order, until one must wait; independent queries are always polled."""
        blocked, ask_alone = "", self.changed or self._clock() >= self._ask_alone_at
        if ask_alone:
            self.changed, self._ask_alone_at = False, self._clock() + ALONE_SECONDS
        for place, waiting in list(self._places.items()):
            asked, expired = waiting.asked, waiting.until <= self._clock()
            if asked is None:
                if expired:
                    del self._places[place]
                continue
            cause = blocked
            if (ask_alone or expired) if waiting.alone else not blocked:
                try:
                    reply = answer(asked.query)
                except BusyError as error:
                    cause = str(error)
                    blocked = blocked or ("" if error.alone else cause)
                else:
                    self._places.pop(place, None)
                    asked.reply(reply)
                    continue
            if expired:
                waiting.asked, waiting.until = None, self._clock() + self._seconds
                asked.reply(Refused("deadline", cause, again=True, queued=True))
