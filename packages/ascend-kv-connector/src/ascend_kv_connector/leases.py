"""Which requests' blocks a producer keeps for readers, until when, and who is done with them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from ascend_kv_connector.errors import TransferError

REMEMBERED = 4096
"""Requests that have ended and whose end can still be told to a reader that comes late."""


class NotYetError(Exception):
    """The request's blocks are not to be had yet, and may be soon."""


@dataclass
class Lease:
    """``blocks`` of one request, whose first ``tokens`` are computed. ``ready`` says whether the device has written them."""

    blocks: list[int]
    tokens: int
    seconds: float
    until: float
    ready: Callable[[], bool]
    readers: set[str] = field(default_factory=set)
    in_use: int = 0


class Leases:
    """The bookkeeping of one rank. Threads may share it; ``clock`` is in seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._live: dict[str, Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._untold: dict[str, str] = {}
        self._early: OrderedDict[str, tuple[set[str], int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def grant(
        self, request: str, blocks: list[int], tokens: int, seconds: float, ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Keep a request's blocks from now on, for ``seconds`` without a reader."""
        with self._lock:
            self._ended.pop(request, None)  # a name may come again
            self._live[request] = Lease(list(blocks), tokens, seconds, self._clock() + seconds, ready)
            early = self._early.pop(request, None)
            if early is not None:
                self._live[request].readers, readers = early
                if len(early[0]) >= readers:
                    self._end(request, "all readers have given up")

    @contextmanager
    def use(self, request: str) -> Iterator[Lease]:
        """The lease of a request, which does not end within; its time begins anew.

        Raises:
            NotYetError: the request is not known yet, or the device is still writing.
            TransferError: the lease has ended, and how.
        """
        with self._lock:
            lease = self._live.get(request)
            if lease is None:
                if request in self._ended:
                    raise TransferError("lease", f"its blocks are no longer kept: {self._ended[request]}")
                raise NotYetError("its blocks have not been announced")
            if not lease.ready():
                raise NotYetError("its blocks are still being written")
            lease.in_use += 1
            lease.until = self._clock() + lease.seconds
        try:
            yield lease
        finally:
            with self._lock:
                lease.in_use -= 1

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
            if len(lease.readers) >= readers:
                self._end(request, "all readers have released them")

    def ended(self) -> dict[str, str]:
        """The requests whose lease has ended since the last call, each once, and how: their blocks are free."""
        with self._lock:
            now = self._clock()
            for request in [name for name, lease in self._live.items() if lease.until <= now and not lease.in_use]:
                self._end(request, f"the lease of {self._live[request].seconds:g} s has expired")
            ended, self._untold = self._untold, {}
        return ended

    def _end(self, request: str, how: str) -> None:
        del self._live[request]
        self._untold[request] = self._ended[request] = how
        _keep_last(self._ended)


def _keep_last(names: OrderedDict) -> None:
    while len(names) > REMEMBERED:
        names.popitem(last=False)
