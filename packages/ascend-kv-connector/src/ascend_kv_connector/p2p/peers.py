# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Work queues by peer: each peer has its own threads, so that a slow or dead peer delays only its
own work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from time import monotonic
from typing import Generic, Protocol, TypeVar

from ascend_transfer.errors import TransferError

Work = TypeVar("Work")
WorkOfWorker = TypeVar("WorkOfWorker", contravariant=True)

IDLE_SECONDS = 60.0
"""Seconds after which a thread without work ends and closes its connections, because its peer may
have ended."""

MAX_IDLE_THREADS = 64
"""Threads without work; beyond that the one that has been idle for longest ends."""

MAX_THREADS = 512
"""Threads of all peers; beyond that work of further peers waits until one ends."""

MAX_STUCK_THREADS = 16
"""Threads of a peer that may be stuck in their work; beyond that, its stuck threads are not
replaced."""


class Worker(Protocol[WorkOfWorker]):
    """State of one thread, such as connections; used only by that thread."""

    def run(self, work: WorkOfWorker) -> None: ...

    def close(self) -> None: ...


class PeerThread(threading.Thread, Generic[Work]):
    """Thread of one peer; ``work`` is what it is at, None while it is idle."""

    def __init__(self, queues: PeerQueues[Work], peer: Peer[Work]) -> None:
        super().__init__(name=queues.name, daemon=True)
        self._queues, self.peer = queues, peer
        self.work: Work | None = None
        self.stop = False

    def run(self) -> None:
        worker = self._queues.make_worker()
        try:
            while (work := self._queues.next_work(self)) is not None:
                worker.run(work)
        finally:
            worker.close()
            self._queues.forget(self)


class Peer(Generic[Work]):
    """Work that waits for a peer, and its threads, at most ``limit``."""

    def __init__(self, lock: threading.Lock, limit: int) -> None:
        self.limit = limit
        self.waiting: deque[Work] = deque()
        self.threads: list[PeerThread[Work]] = []
        self.changed = threading.Condition(lock)


class PeerQueues(Generic[Work]):
    """A queue for each peer, in order of arrival; threads are started as they are needed."""

    def __init__(self, name: str, make_worker: Callable[[], Worker[Work]]) -> None:
        """``name`` is that of the threads; ``make_worker`` is called in each of them, and may not
        fail."""
        self.name, self.make_worker = name, make_worker
        self._lock = threading.Lock()
        self._peers: dict[Hashable, Peer[Work]] = {}
        # The thread that has been idle for longest comes first.
        self._idle: dict[PeerThread[Work], None] = {}
        self._stuck: list[PeerThread[Work]] = []
        self._closed = False

    @property
    def thread_count(self) -> int:
        """Number of threads, with stuck ones."""
        with self._lock:
            return self._count()

    def put(self, peer: Hashable, work: Work, threads: int) -> None:
        """Queue work for a peer that may have this many threads.

        Raises:
            TransferError: code ``internal``; the peer has no thread, and none can be started.
        """
        with self._lock:
            queue = self._peers.setdefault(peer, Peer(self._lock, threads))
            queue.waiting.append(work)
            if (error := self._start_threads(queue)) and not queue.threads:
                queue.waiting.pop()
                raise TransferError("internal", error)
            queue.changed.notify()

    def abandon(self, work: Work) -> None:
        """The thread at this work is stuck: it ends when it returns, and another one takes its
        place meanwhile."""
        with self._lock:
            threads = (thread for queue in self._peers.values() for thread in queue.threads)
            thread = next((each for each in threads if each.work is work), None)
            if thread is None:
                return
            queue = thread.peer
            if sum(stuck.peer is queue for stuck in self._stuck) < MAX_STUCK_THREADS:
                thread.stop = True
                queue.threads.remove(thread)
                self._stuck.append(thread)
                self._start_threads(queue)

    def close(self, seconds: float) -> bool:
        """End all threads; whether they ended in time."""
        with self._lock:
            self._closed = True
            of_peers = (thread for queue in self._peers.values() for thread in queue.threads)
            threads = [*of_peers, *self._stuck]
            for thread in threads:
                thread.stop = True
            for queue in self._peers.values():
                queue.changed.notify_all()
        until = monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, until - monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def next_work(self, thread: PeerThread[Work]) -> Work | None:
        """The thread's next work; None if it is to end."""
        queue, until = thread.peer, monotonic() + IDLE_SECONDS
        with self._lock:
            thread.work, self._idle[thread] = None, None
            while not thread.stop and not queue.waiting and (left := until - monotonic()) > 0:
                queue.changed.wait(left)
            del self._idle[thread]
            if not thread.stop and queue.waiting:
                thread.work = queue.waiting.popleft()
            else:
                thread.stop = True
                if thread in queue.threads:
                    queue.threads.remove(thread)
                self._start_threads(queue)  # Work may have arrived for this thread.
            return thread.work

    def forget(self, thread: PeerThread[Work]) -> None:
        """A thread has ended; peers whose work waits for one may start theirs."""
        with self._lock:
            if thread in self._stuck:
                self._stuck.remove(thread)
            if thread in thread.peer.threads:
                thread.peer.threads.remove(thread)
            for queue in self._peers.values():
                self._start_threads(queue)
            for peer, queue in list(self._peers.items()):
                if not queue.threads and not queue.waiting:
                    del self._peers[peer]

    def _start_threads(self, queue: Peer[Work]) -> str:
        """Start a thread if there is work for it; returns why it cannot be started."""
        free = sum(thread in self._idle and not thread.stop for thread in queue.threads)
        is_full = len(queue.threads) >= queue.limit or self._count() >= MAX_THREADS
        if self._closed or is_full or len(queue.waiting) <= free:
            return ""
        thread = PeerThread(self, queue)
        try:
            thread.start()  # it waits for the lock
        except RuntimeError as error:  # too many processes and threads
            return str(error)
        queue.threads.append(thread)
        others = [idle for idle in self._idle if idle.peer is not queue and not idle.stop]
        for idle in others[: max(0, len(others) - MAX_IDLE_THREADS)]:
            idle.stop = True
            idle.peer.changed.notify_all()
        return ""

    def _count(self) -> int:
        return sum(len(queue.threads) for queue in self._peers.values()) + len(self._stuck)


class CircuitBreaker:
    """Remembers that a peer does not answer: after :data:`FAILURES` in a row it is not contacted
    for some seconds."""

    FAILURES = 2

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._failures, self._last, self._cause = 0, 0.0, ""
        self._lock = threading.Lock()

    def refusal(self) -> str:
        """Why the peer is not to be contacted now; "" if it is."""
        with self._lock:
            since = self._clock() - self._last
            if self._failures < self.FAILURES or since >= self._seconds:
                return ""
            return (
                f"not contacted: {self._failures} requests in a row failed, the last one"
                f" {since:.1f} s ago ({self._cause})"
            )

    def note_failure(self, cause: str, began: float | None = None) -> None:
        """A request that ``began`` before the last failure has met the same outage, and does not
        count."""
        with self._lock:
            if began is None or began >= self._last or not self._failures:
                self._failures += 1
            self._last, self._cause = self._clock(), cause

    def note_success(self) -> None:
        with self._lock:
            self._failures = 0
