# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Leases: which requests' blocks a producer keeps for readers, until when, and which readers have
finished with them."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from ascend_transfer.errors import TransferError

from ascend_kv_connector.p2p.bounded import BoundedDict

MAX_READERS = 64
"""Instances that are remembered as readers of one request."""


class NotReadyError(Exception):
    """The request's blocks are not available yet, but may be soon."""


class PrefillProgress:
    """Computed tokens of a prompt by layer; a layer's tokens are ready when the device has executed
    its work. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[str, int] = {}
        self._pending: dict[str, deque[tuple[int, Callable[[], bool]]]] = {}

    def record(self, layer: str, tokens: int, ready: Callable[[], bool]) -> None:
        """The layer's first ``tokens`` are ready once ``ready()`` is true; ignored if this number
        was recorded before."""
        with self._lock:
            marks = self._pending.setdefault(layer, deque())
            if tokens > (marks[-1][0] if marks else self._ready.get(layer, 0)):
                marks.append((tokens, ready))

    def ready_tokens(self, layers: Iterable[str]) -> int:
        """Number of tokens that are ready in all of these layers."""
        with self._lock:
            for layer in (names := list(layers)):
                marks = self._pending.get(layer)
                while marks and marks[0][1]():
                    self._ready[layer] = marks.popleft()[0]
            return min((self._ready.get(layer, 0) for layer in names), default=0)


@dataclass
class Reader:
    """An instance that reads a request: which of its ``ranks`` ranks have finished; 0 ranks if none
    has reported it."""

    finished: set[int] = field(default_factory=set)
    ranks: int = 0

    @property
    def has_finished(self) -> bool:
        return 0 < self.ranks <= len(self.finished)


@dataclass
class Lease:
    """``blocks`` of a request of ``tokens`` tokens; ``ready_tokens(layers)`` is how many of them
    the device has written.

    ``finished`` is False during prefill: the blocks belong to the running request and the lease
    does not expire. ``number`` distinguishes it from other leases, also of the same request.
    ``revoked``: the blocks are not the request's any more.
    """

    blocks: list[int]
    tokens: int
    seconds: float
    expires: float
    ready_tokens: Callable[[Iterable[str]], int]
    finished: bool = False
    granted: float = 0.0
    readers: dict[str, Reader] = field(default_factory=dict)
    in_use: int = 0
    number: int = 0
    revoked: bool = False

    def raise_if_revoked(self) -> None:
        """Check, after a use of the blocks, that they were the request's all the time.

        Raises:
            NotReadyError: they were taken away; the request may get others.
        """
        if self.revoked:
            raise NotReadyError("the prompt was preempted")


class Leases:
    """Leases of one rank; thread-safe. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Condition()
        self._live: dict[str, Lease] = {}
        self._ended: BoundedDict[str] = BoundedDict()
        self._unreported: dict[str, str] = {}
        self._early_readers: BoundedDict[dict[str, Reader]] = BoundedDict()
        self._suspended = ""
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._live)

    def oldest(self) -> float:
        """Seconds since the oldest lease that is live was granted; 0 without leases."""
        with self._lock:
            return max(
                (self._clock() - lease.granted for lease in self._live.values() if lease.finished),
                default=0.0,
            )

    def grant(
        self,
        request: str,
        blocks: list[int],
        tokens: int,
        seconds: float,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Keep a finished request's blocks, for ``seconds`` after the last use."""
        with self._lock:
            lease = self._update(request, blocks, tokens, lambda layers: tokens if ready() else 0)
            lease.finished, lease.seconds, lease.granted = True, seconds, self._clock()
            lease.expires = lease.granted + seconds
            self._end_if_unused(request, lease)

    def track(
        self, request: str, blocks: list[int], tokens: int, progress: PrefillProgress
    ) -> None:
        """Update the blocks of a request during prefill; readers may fetch the tokens that are
        ready."""
        with self._lock:
            self._update(request, blocks, tokens, progress.ready_tokens)

    def revoke(self, request: str, reason: str = "") -> None:
        """Withdraw the blocks of a request during prefill. What is being read of them does not
        count (:attr:`Lease.revoked`).

        Without a reason the request was preempted: readers are told to retry, as :meth:`track` will
        give it new blocks.
        """
        with self._lock:
            lease = self._live.get(request)
            if lease is None or lease.finished:
                return
            lease.ready_tokens, lease.revoked = lambda layers: 0, True
            del self._live[request]
            if reason:
                self._ended[request] = reason
            elif lease.readers:
                self._early_readers[request] = lease.readers

    @contextmanager
    def use(self, request: str, reader: str) -> Iterator[Lease]:
        """Use a request's lease for a reader; it is renewed, and does not end within the context.

        Raises:
            NotReadyError: the request is not known yet.
            TransferError: the lease has ended, with the reason.
        """
        with self._lock:
            lease = self._live.get(request)
            if lease is None or self._suspended:
                if request in self._ended:
                    raise TransferError(
                        "lease", f"the request's blocks were freed: {self._ended[request]}"
                    )
                if self._suspended:
                    raise TransferError("lease", self._suspended)
                raise NotReadyError("the request's blocks are not available yet")
            _register(lease.readers, reader)
            lease.in_use += 1
            lease.expires = self._clock() + lease.seconds
        try:
            yield lease
        finally:
            with self._lock:
                lease.in_use -= 1
                self._lock.notify_all()

    def confirm(self, request: str, number: int) -> None:
        """Check that a lease has not ended: its blocks were the request's all the time.

        Raises:
            TransferError: it has ended.
        """
        with self._lock:
            lease = self._live.get(request)
            if lease is None or lease.number != number:
                reason = self._ended.get(request, "the prompt was preempted")
                raise TransferError(
                    "lease", f"the request's blocks were freed while they were read: {reason}"
                )

    def finish(self, request: str, reader: str, rank: int, ranks: int) -> None:
        """A reader rank releases the request; the lease ends when all ranks of all its readers have
        released it."""
        with self._lock:
            lease = self._live.get(request)
            if lease is None and request in self._ended:
                return
            # No lease: the reader gave up before it was granted.
            readers = lease.readers if lease else self._early_readers.get(request, {})
            if rank >= ranks:
                return
            known = _register(readers, reader)
            known.finished.add(rank)
            known.ranks = ranks
            if lease:
                self._end_if_unused(request, lease)
            else:
                self._early_readers[request] = readers

    def renew(self, request: str, reader: str) -> None:
        """A reader waits for a finished request's blocks."""
        with self._lock:
            lease = self._live.get(request)
            if lease is not None:
                _register(lease.readers, reader)
                lease.expires = self._clock() + lease.seconds

    def end(self, request: str) -> None:
        """No consumer will read a finished request's blocks."""
        with self._lock:
            lease = self._live.get(request)
            if lease is not None and lease.finished and not lease.in_use:
                self._end(request, "the router has aborted the request")

    def suspend(self, reason: str, seconds: float) -> bool:
        """End all leases, and refuse readers until :meth:`resume`; False, and no effect, if some
        still read after ``seconds``."""
        with self._lock:
            self._suspended = reason
            if not self._lock.wait_for(
                lambda: not any(lease.in_use for lease in self._live.values()), seconds
            ):
                self._suspended = ""
                return False
            for request, lease in list(self._live.items()):
                if lease.finished:
                    self._end(request, reason)
                else:
                    del self._live[request]
                    self._ended[request] = reason
        return True

    def resume(self) -> None:
        """Admit readers again."""
        with self._lock:
            self._suspended = ""

    def pop_ended(self) -> dict[str, str]:
        """Requests whose lease ended since the last call, with the reason; their blocks
        are free."""
        with self._lock:
            now = self._clock()
            expired = [
                name
                for name, lease in self._live.items()
                if lease.finished and lease.expires <= now and not lease.in_use
            ]
            for request in expired:
                self._end(request, f"the lease of {self._live[request].seconds:g} s has expired")
            ended, self._unreported = self._unreported, {}
        return ended

    def _update(
        self,
        request: str,
        blocks: list[int],
        tokens: int,
        ready_tokens: Callable[[Iterable[str]], int],
    ) -> Lease:
        self._ended.pop(request, None)  # request ids may be reused
        if request not in self._live:
            self._live[request] = Lease([], 0, 0.0, 0.0, ready_tokens, number=next(self._numbers))
        lease = self._live[request]
        lease.blocks, lease.tokens, lease.ready_tokens = list(blocks), tokens, ready_tokens
        if request in self._early_readers:
            lease.readers = self._early_readers.pop(request)
        return lease

    def _end_if_unused(self, request: str, lease: Lease) -> None:
        if (
            lease.finished
            and lease.readers
            and all(reader.has_finished for reader in lease.readers.values())
        ):
            self._end(request, "all readers have released it")

    def _end(self, request: str, reason: str) -> None:
        self._live.pop(request).revoked = True
        self._unreported[request] = self._ended[request] = reason


def _register(readers: dict[str, Reader], reader: str) -> Reader:
    """The reader of this name, which is the latest now. Beyond :data:`MAX_READERS` the one that was
    not heard of for longest is forgotten: names that are invented must not shut a reader out."""
    found = readers.pop(reader, None) or Reader()
    while len(readers) >= MAX_READERS:
        del readers[next(iter(readers))]
    readers[reader] = found
    return found
