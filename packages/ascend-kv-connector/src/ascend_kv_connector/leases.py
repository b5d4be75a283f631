"""Which requests' blocks a producer keeps for readers, until when, and who is done with them."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from ascend_kv_connector.errors import TransferError

REMEMBERED = 4096
"""Requests that have ended and whose end can still be told to a reader that comes late."""


class NotYetError(Exception):
    """The request's blocks are not to be had yet, and may be soon."""


class Growth:
    """How far a prompt is computed, by layer: a layer's tokens are there when what was enqueued for them is done."""

    def __init__(self) -> None:
        self._there: dict[str, int] = {}
        self._enqueued: dict[str, deque[tuple[int, Callable[[], bool]]]] = {}

    def mark(self, layer: str, tokens: int, ready: Callable[[], bool]) -> None:
        """The layer's first ``tokens`` are there once ``ready`` says so, unless it has been marked with as many."""
        marks = self._enqueued.setdefault(layer, deque())
        if tokens > (marks[-1][0] if marks else self._there.get(layer, 0)):
            marks.append((tokens, ready))

    def tokens(self, layers: Iterable[str]) -> int:
        """How many tokens are there in all of these layers."""
        for layer in (names := list(layers)):
            marks = self._enqueued.get(layer)
            while marks and marks[0][1]():
                self._there[layer] = marks.popleft()[0]
        return min((self._there.get(layer, 0) for layer in names), default=0)


@dataclass
class Lease:
    """``blocks`` of one request of ``tokens``; ``there`` says how many of them the device has written, of some layers.

    ``finished`` is False while the prompt is being computed: its blocks are the request's own, and it does not expire.
    """

    blocks: list[int]
    tokens: int
    seconds: float
    until: float
    there: Callable[[Iterable[str]], int]
    finished: bool = False
    readers: set[str] = field(default_factory=set)
    expected: int = 0
    in_use: int = 0


class Leases:
    """The bookkeeping of one rank. Threads may share it; ``clock`` is in seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Condition()
        self._live: dict[str, Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._untold: dict[str, str] = {}
        self._early: OrderedDict[str, tuple[set[str], int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def grant(
        self, request: str, blocks: list[int], tokens: int, seconds: float, ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Keep a finished request's blocks from now on, for ``seconds`` without a reader."""
        with self._lock:
            lease = self._take(request, blocks, tokens, lambda layers: tokens if ready() else 0)
            lease.finished, lease.seconds, lease.until = True, seconds, self._clock() + seconds
            if lease.readers and len(lease.readers) >= lease.expected:
                self._end(request, "all readers have released them")

    def grow(self, request: str, blocks: list[int], tokens: int, growth: Growth) -> None:
        """The blocks so far of a request whose prompt, of ``tokens``, is being computed; readers may have what is there."""
        with self._lock:
            self._take(request, blocks, tokens, growth.tokens)

    def withdraw(self, request: str, seconds: float, how: str = "") -> None:
        """Take a growing request's blocks back, after readers that use them just now, for which it waits up to ``seconds``.

        Without ``how`` it has been preempted: readers are told to come again, as :meth:`grow` gives it blocks anew.
        """
        with self._lock:
            lease = self._live.get(request)
            if lease is None or lease.finished:
                return
            lease.there = lambda layers: 0
            self._lock.wait_for(lambda: not lease.in_use, seconds)
            del self._live[request]
            if how:
                self._ended[request] = how
                _keep_last(self._ended)
            elif lease.readers:
                self._early[request] = lease.readers, lease.expected

    @contextmanager
    def use(self, request: str) -> Iterator[Lease]:
        """The lease of a request, which does not end within; its time begins anew.

        Raises:
            NotYetError: the request is not known yet.
            TransferError: the lease has ended, and how.
        """
        with self._lock:
            lease = self._live.get(request)
            if lease is None:
                if request in self._ended:
                    raise TransferError("lease", f"its blocks are no longer kept: {self._ended[request]}")
                raise NotYetError("its blocks have not been announced")
            lease.in_use += 1
            lease.until = self._clock() + lease.seconds
        try:
            yield lease
        finally:
            with self._lock:
                lease.in_use -= 1
                self._lock.notify_all()

    def release(self, request: str, reader: str, readers: int) -> None:
        """One of so many readers is done; after the last the lease ends."""
        with self._lock:
            lease = self._live.get(request)
            if lease is None:
                if request not in self._ended:  # a reader that has given up before the blocks were announced here
                    self._early.setdefault(request, (set(), readers))[0].add(reader)
                    _keep_last(self._early)
                return
            lease.readers.add(reader)
            lease.expected = readers
            if len(lease.readers) >= readers and lease.finished:
                self._end(request, "all readers have released them")

    def ended(self) -> dict[str, str]:
        """The requests whose lease has ended since the last call, each once, and how: their blocks are free."""
        with self._lock:
            now = self._clock()
            over = [name for name, lease in self._live.items() if lease.finished and lease.until <= now and not lease.in_use]
            for request in over:
                self._end(request, f"the lease of {self._live[request].seconds:g} s has expired")
            ended, self._untold = self._untold, {}
        return ended

    def _take(self, request: str, blocks: list[int], tokens: int, there: Callable[[Iterable[str]], int]) -> Lease:
        self._ended.pop(request, None)  # a name may come again
        lease = self._live.setdefault(request, Lease([], 0, 0.0, 0.0, there))
        lease.blocks, lease.tokens, lease.there = list(blocks), tokens, there
        if request in self._early:
            lease.readers, lease.expected = self._early.pop(request)
        return lease

    def _end(self, request: str, how: str) -> None:
        del self._live[request]
        self._untold[request] = self._ended[request] = how
        _keep_last(self._ended)


def _keep_last(names: OrderedDict) -> None:
    while len(names) > REMEMBERED:
        names.popitem(last=False)
