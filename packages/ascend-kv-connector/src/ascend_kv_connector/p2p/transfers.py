# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""State of a consumer's transfers: each ends exactly once, done or failed, and nothing is written
to its blocks afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal, NamedTuple, get_args

from ascend_transfer.errors import Kind, Settled, TransferError, never, printable

Phase = Literal["queue", "connect", "wait", "read", "unpack"]
"""In the queue of its peer; connecting to ranks; waiting for chunks to be packed; reading them;
writing them to the cache."""

PHASES: tuple[Phase, ...] = get_args(Phase)

HINTS: dict[Kind, str] = {
    "peer": "check that the instance is alive and its ports are reachable from here",
    "transport": "check the peer's log and the network between the two",
    "lease": (
        "raise lease on the prefill instance, or route the request to a less loaded decode instance"
    ),
    "deadline": "raise transfer_timeout, or find what is slow between the two instances",
    "verify": "data was corrupted in transit: check the network and the memory of both machines",
    "mismatch": "start both instances with the same model, dtype and connector",
    "aborted": "the client disconnected; nothing to do",
    "sleep": (
        "transfers end before an instance sleeps: route no requests to it, and wait until it has"
        " none"
    ),
    "internal": "this is a bug in ascend-kv-connector; please report it with this line",
}
"""Hints for failed transfers, by error code."""

HINTS_OF_MACHINE = {
    "can't start new thread": "raise the limit of processes and threads (ulimit -u, pids.max)",
    "Too many open files": "raise the limit of open files (ulimit -n)",
    "out of memory": "lower --gpu-memory-utilization, or chunk_mib, slots and lanes",
    "Cannot allocate memory": "free memory of this machine, or lower chunk_mib, slots and lanes",
}
"""Hints for what the machine lacks, here or at the peer, by a part of the cause."""


class Source(NamedTuple):
    """Location of a request's blocks: the producer's engine id, its request id, and (host, port) of
    each of its ranks."""

    engine: str
    request: str
    ranks: tuple[tuple[str, int], ...]


def hint(error: TransferError) -> str:
    """The error's own hint, or that of its cause or its error code."""
    of_machine = (fix for cause, fix in HINTS_OF_MACHINE.items() if cause in str(error))
    return error.hint or next(of_machine, HINTS[error.kind])


@dataclass(frozen=True)
class Done:
    """All tokens were loaded. ``size`` in bytes, ``seconds`` since the transfer was requested;
    ``phases`` are parts of them.

    ``copied`` bytes were copied here from staging buffers; ``messages`` were sent to the producer.
    """

    request: str
    size: int
    seconds: float
    phases: dict[Phase, float] = field(default_factory=dict)
    copied: int = 0
    messages: int = 0

    def __str__(self) -> str:
        return (
            f"KV transfer of {printable(self.request)} done after {self.seconds:.3f} s,"
            f" {self.size / 2**20:.1f} MiB"
        )


@dataclass(frozen=True)
class Failed:
    """The transfer failed. ``blocks`` are local blocks that were not loaded; ``size`` of ``total``
    bytes were read."""

    request: str
    blocks: tuple[int, ...]
    kind: Kind
    cause: str
    hint: str
    peer: str
    engine: str
    transport: str
    size: int
    total: int
    seconds: float

    def __str__(self) -> str:
        first, last = (self.blocks[0], self.blocks[-1]) if self.blocks else (0, 0)
        return (
            f"KV transfer of {printable(self.request)} failed after {self.seconds:.2f} s:"
            f" {self.cause}; peer"
            f" {self.peer} of engine {self.engine}, transport {self.transport},"
            f" {self.size / 2**20:.1f} of {self.total / 2**20:.1f} MiB read, {len(self.blocks)}"
            f" blocks from {first} to {last} not loaded; {self.hint}"
        )


class TransferEndedError(Exception):
    """The transfer has already ended; work on it stops."""


class Transfer:
    """Load of tokens ``start`` to ``stop`` of a request into ``blocks``; the first block holds
    token ``start``.

    One thread works on it and another may end it at its deadline. ``writing`` is held while the
    cache is written: the transfer does not end meanwhile, and nothing is written after its end. A
    layer-by-layer transfer (``layerwise``) has no source until a producer sends PrefillStarted.
    ``after`` is the device's event from which on the blocks may be written.
    """

    def __init__(
        self,
        request: str,
        source: Source | None,
        blocks: list[int],
        start: int,
        stop: int,
        seconds: float,
        after: Any = None,
    ) -> None:
        self.request, self.source, self.blocks, self.start = request, source, blocks, start
        self.stop = stop
        self.after = after
        self.started = monotonic()
        self.deadline = self.started + seconds
        self.seconds = seconds
        self.peer, self.size, self.total = "(none)", 0, 0
        self.copied = self.messages = 0
        self.phases: dict[Phase, float] = {}
        self.written_until: dict[int, int] = {}
        self.layerwise = source is None
        self._lock = threading.Lock()
        self._outcome: Done | Failed | None = None
        self.not_ready_since = 0.0
        self._reads, self._unsettled = 0, list[Settled]()

    @property
    def outcome(self) -> Done | Failed | None:
        return self._outcome

    def remaining(self) -> float:
        """Seconds until the deadline.

        Raises:
            TransferError: it has passed.
            TransferEndedError: the transfer has ended.
        """
        if self._outcome is not None:
            raise TransferEndedError
        left = self.deadline - monotonic()
        if left <= 0:
            raise TransferError("deadline", f"the deadline of {self.seconds:g} s has passed")
        return left

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the time of the context to a phase; each phase is in one thread at a time."""
        began = monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + monotonic() - began

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Held while tokens are written to the blocks.

        Raises:
            TransferEndedError: the transfer has ended; nothing may be written.
        """
        with self._lock:
            if self._outcome is not None:
                raise TransferEndedError
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Held while the transport writes to the blocks; the transfer may end meanwhile, but is not
        :meth:`settled`.

        Raises:
            TransferEndedError: the transfer has ended; nothing may be written.
        """
        with self._lock:
            if self._outcome is not None:
                raise TransferEndedError
            self._reads += 1
        unsettled = list[Settled]()
        try:
            yield
        except BaseException as error:
            unsettled = [getattr(error, "settled", never)]
            raise
        finally:
            with self._lock:
                self._reads -= 1
                self._unsettled += unsettled

    def wait_until_writable(self, stream_context: Callable[..., AbstractContextManager]) -> None:
        """Wait until the device has done what it does with the blocks before."""
        if self.after is not None:
            with stream_context(self.after):
                self.after = None

    def count(self, part: int, size: int, stop: int) -> None:
        """``size`` bytes of a part were written, which has all tokens up to ``stop``."""
        with self._lock:
            self.size += size
            self.written_until[part] = stop

    def settled(self) -> bool:
        """Whether it has ended, and nothing writes to its blocks any more: they may be freed, or
        written by others."""
        with self._lock:
            if self._outcome is None or self._reads:
                return False
            self._unsettled = [settled for settled in self._unsettled if not settled()]
            return not self._unsettled

    def succeed(self) -> bool:
        seconds = monotonic() - self.started
        return self._end(
            Done(self.request, self.size, seconds, dict(self.phases), self.copied, self.messages)
        )

    def fail(self, error: TransferError, transport: str, block_size: int) -> bool:
        """End the transfer as failed, unless it has ended; returns whether this call ended it."""
        written = min(self.written_until.values(), default=self.start)
        # All tokens of a partly written block count as missing.
        first = min((written - self.start) // block_size, len(self.blocks))
        failed = Failed(
            request=self.request,
            blocks=tuple(self.blocks[first:]),
            kind=error.kind,
            cause=str(error),
            hint=hint(error),
            peer=self.peer,
            engine=printable(self.source.engine) if self.source else "(none)",
            transport=transport,
            size=self.size,
            total=self.total,
            seconds=monotonic() - self.started,
        )
        return self._end(failed)

    def _end(self, outcome: Done | Failed) -> bool:
        with self._lock:
            if self._outcome is not None:
                return False
            self._outcome = outcome
            return True
