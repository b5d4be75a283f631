"""Which requests' blocks a producer keeps for readers, until when, and who is done with them."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from ascend_kv_connector.errors import TransferError

MAX_REMEMBERED = 4096
"""Requests that have ended and whose end can still be told to a reader that comes late."""


class NotReadyError(Exception):
    """The request's blocks are not to be had yet, and may be soon."""


class PrefillProgress:
    """How far a prompt is computed, by layer: a layer's tokens are there when what was enqueued for them is done."""

    def __init__(self) -> None:
        self._ready: dict[str, int] = {}
        self._pending: dict[str, deque[tuple[int, Callable[[], bool]]]] = {}

    def record(self, layer: str, tokens: int, ready: Callable[[], bool]) -> None:
        """The layer's first ``tokens`` are there once ``ready`` says so, unless it has been marked with as many."""
        marks = self._pending.setdefault(layer, deque())
        if tokens > (marks[-1][0] if marks else self._ready.get(layer, 0)):
            marks.append((tokens, ready))

    def ready_tokens(self, layers: Iterable[str]) -> int:
        """How many tokens are there in all of these layers."""
        for layer in (names := list(layers)):
            marks = self._pending.get(layer)
            while marks and marks[0][1]():
                self._ready[layer] = marks.popleft()[0]
        return min((self._ready.get(layer, 0) for layer in names), default=0)


@dataclass
class Lease:
    """``blocks`` of one request of ``tokens``; ``there`` says how many of them the device has written, of some layers.

    ``finished`` is False while the prompt is being computed: its blocks are the request's own, and it does not expire.
    """

    blocks: list[int]
    tokens: int
    seconds: float
    expires: float
    ready_tokens: Callable[[Iterable[str]], int]
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
        self._unreported: dict[str, str] = {}
        self._early_releases: OrderedDict[str, tuple[set[str], int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def grant(
        self, request: str, blocks: list[int], tokens: int, seconds: float, ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Keep a finished request's blocks from now on, for ``seconds`` without a reader."""
        with self._lock:
            lease = self._update(request, blocks, tokens, lambda layers: tokens if ready() else 0)
            lease.finished, lease.seconds, lease.expires = True, seconds, self._clock() + seconds
            if lease.readers and len(lease.readers) >= lease.expected:
                self._end(request, "all readers have released them")

    def track(self, request: str, blocks: list[int], tokens: int, progress: PrefillProgress) -> None:
        """The blocks so far of a request whose prompt, of ``tokens``, is being computed; readers may have what is there."""
        with self._lock:
            self._update(request, blocks, tokens, progress.ready_tokens)

    def revoke(self, request: str, seconds: float, reason: str = "") -> None:
        """Take a growing request's blocks back, after readers that use them just now, for which it waits up to ``seconds``.

        Without ``how`` it has been preempted: readers are told to come again, as :meth:`grow` gives it blocks anew.
        """
        with self._lock:
            lease = self._live.get(request)
            if lease is None or lease.finished:
                return
            lease.ready_tokens = lambda layers: 0
            self._lock.wait_for(lambda: not lease.in_use, seconds)
            del self._live[request]
            if reason:
                self._ended[request] = reason
                _keep_last(self._ended)
            elif lease.readers:
                self._early_releases[request] = lease.readers, lease.expected

    @contextmanager
    def use(self, request: str) -> Iterator[Lease]:
        """The lease of a request, which does not end within; its time begins anew.

        Raises:
            NotReadyError: the request is not known yet.
            TransferError: the lease has ended, and how.
        """
        with self._lock:
            lease = self._live.get(request)
            if lease is None:
                if request in self._ended:
                    raise TransferError("lease", f"its blocks are no longer kept: {self._ended[request]}")
                raise NotReadyError("its blocks have not been announced")
            lease.in_use += 1
            lease.expires = self._clock() + lease.seconds
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
                    self._early_releases.setdefault(request, (set(), readers))[0].add(reader)
                    _keep_last(self._early_releases)
                return
            lease.readers.add(reader)
            lease.expected = readers
            if len(lease.readers) >= readers and lease.finished:
                self._end(request, "all readers have released them")

    def pop_ended(self) -> dict[str, str]:
        """The requests whose lease has ended since the last call, each once, and how: their blocks are free."""
        with self._lock:
            now = self._clock()
            expired = [name for name, lease in self._live.items() if lease.finished and lease.expires <= now and not lease.in_use]
            for request in expired:
                self._end(request, f"the lease of {self._live[request].seconds:g} s has expired")
            ended, self._unreported = self._unreported, {}
        return ended

    def _update(self, request: str, blocks: list[int], tokens: int, ready_tokens: Callable[[Iterable[str]], int]) -> Lease:
        self._ended.pop(request, None)  # a name may come again
        lease = self._live.setdefault(request, Lease([], 0, 0.0, 0.0, ready_tokens))
        lease.blocks, lease.tokens, lease.ready_tokens = list(blocks), tokens, ready_tokens
        if request in self._early_releases:
            lease.readers, lease.expected = self._early_releases.pop(request)
        return lease

    def _end(self, request: str, reason: str) -> None:
        del self._live[request]
        self._unreported[request] = self._ended[request] = reason
        _keep_last(self._ended)


def _keep_last(names: OrderedDict) -> None:
    while len(names) > MAX_REMEMBERED:
        names.popitem(last=False)
