# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Writes of KV cache into a decode instance's blocks during the prefill, layer after layer as the
tokens are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any, Protocol

from ascend_transfer.engine import Engine
from ascend_transfer.errors import Settled, TransferError, at_once, never
from ascend_transfer.query_queue import BusyError

from ascend_kv_connector.p2p.paged_cache import PagedCache
from ascend_kv_connector.p2p.producer.leases import Lease, NotReadyError
from ascend_kv_connector.p2p.protocol import Owner, Push, Pushed, Refused, Reply
from ascend_kv_connector.p2p.runs import Placement, plan_runs, token_slots

POLL_SECONDS = 0.002
"""Interval at which a prefill's events are queried, after something was written or a step was
launched."""

STARTED_SECONDS = 0.02
"""Longest interval for a prompt that is being computed."""

WAITING_SECONDS = 0.05
"""Longest interval for a prompt that is not: all threads together must leave the interpreter to the
one that launches."""

MAX_ENDED = 1024
"""Pushes that have ended and whose reader has not been told."""

FAILED_SECONDS = 3600.0
"""Seconds for which a push with a failed write is remembered, for a reader that is paused or cut
off meanwhile."""


class Job:
    """A push. ``reply`` is set at its end, which comes soon after its reader was last ``heard``.

    ``failed``: since when a write has failed; it may be in progress until it is ``settled``.
    Cancelled before it has a thread, a job is not ``started`` any more.
    """

    def __init__(self, push: Push) -> None:
        self.push, self.heard = push, monotonic()
        self.reply: Reply | None = None
        self.started = self.cancelled = False
        self.failed = 0.0
        self.settled: Settled = at_once


class ProducerView(Protocol):
    """The part that a pusher uses of :class:`~ascend_kv_connector.p2p.producer.producer.Producer`."""

    cache: PagedCache
    memory: list[tuple[int, int]]
    transport: Engine
    steps: Steps

    def push_ended(self) -> None: ...

    def use_lease(self, request: str, reader: str) -> AbstractContextManager[Lease]: ...


class Steps:
    """Counts what the engine has launched, for threads that wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def note(self) -> None:
        """Blocks were given to prompts that readers wait for, or their tokens are being
        computed."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, count: int, seconds: float) -> int:
        """Wait until there are others than ``count``, for ``seconds`` at most; returns their
        number."""
        with self._changed:
            self._changed.wait_for(lambda: self._count != count, seconds)
            return self._count


class PushJobs:
    """Jobs of a rank by reader."""

    def __init__(self, start: Callable[[Job], None]) -> None:
        """``start(job)`` runs it in another thread, or raises TransferError."""
        self._start = start
        self._lock = threading.Lock()
        self._jobs: dict[Owner, Job] = {}

    def answer(self, owner: Owner, push: Push) -> Reply:
        """The reply at the end of the push, which starts with the reader's first query.

        Raises:
            BusyError: it has not ended, or an earlier one of the same name has not.
            TransferError: a write of an earlier one of the same name has failed.
        """
        with self._lock:
            if owner in self._jobs and self._jobs[owner].push != push:
                self._stop(owner, owner)  # Request ids may be reused.
            if owner not in self._jobs:
                until = monotonic() - FAILED_SECONDS
                ended = [
                    each
                    for each, job in self._jobs.items()
                    if job.reply and (not job.failed or job.failed < until) and job.settled()
                ]
                for each in ended[: max(0, len(ended) - MAX_ENDED)]:
                    del self._jobs[each]
                self._start(job := Job(push))
                self._jobs[owner] = job
            job = self._jobs[owner]
            job.heard = monotonic()
            if job.reply is None:
                raise BusyError(owner, "the prompt is being computed", independent=True)
            if not job.failed:
                del self._jobs[owner]
            return job.reply

    def begin(self, job: Job) -> bool:
        """Whether a job that has a thread now is still wanted."""
        with self._lock:
            job.started = not job.cancelled
            return job.started

    def heard(self, request: str, reader: str) -> None:
        """A reader waits for the ends of its pushes."""
        with self._lock:
            for owner, job in self._jobs.items():
                if owner[:2] == (request, reader):
                    job.heard = monotonic()

    def stop(self, owner: Owner) -> None:
        """End a push: on return nothing is written any more.

        Raises:
            BusyError: it still writes.
            TransferError: nothing is written any more, but a write has failed, and what was sent of
                it may still arrive.
        """
        with self._lock:
            self._stop(owner, (*owner, "stop"))

    def _stop(self, owner: Owner, key: tuple[Any, ...]) -> None:
        if (job := self._jobs.get(owner)) is None:
            return
        job.cancelled = True
        if (job.started and job.reply is None) or not job.settled():
            raise BusyError(key, "a write is in progress", independent=True)
        if job.failed:
            raise TransferError(
                "transport", "a write has failed, and what was sent of it may still arrive"
            )
        del self._jobs[owner]


class Pusher:
    """One thread that runs jobs."""

    def __init__(
        self, producer: ProducerView, patience: float, begin: Callable[[Job], bool]
    ) -> None:
        """A reader that is not heard of for ``patience`` seconds is gone. ``begin(job)``: whether a
        job is still wanted."""
        self._producer, self._patience, self._begin = producer, patience, begin

    def run(self, job: Job) -> None:
        if not self._begin(job):
            return
        try:
            job.reply = Pushed(self._push(job))
        except TransferError as error:
            job.reply = Refused(error.kind, str(error))
        except Exception as error:
            job.reply = Refused("internal", f"{type(error).__name__}: {error}")
        self._producer.push_ended()

    def close(self) -> None:
        pass

    def _push(self, job: Job) -> int:
        """Write all layers; returns the number of bytes."""
        push, cache = job.push, self._producer.cache
        layers: dict[str, list[int]] = {}
        for place, index in enumerate(push.regions):
            layers.setdefault(cache.regions[index].layer, []).append(place)
        at, size = dict.fromkeys(layers, push.start), 0
        pause, steps = POLL_SECONDS, 0
        while unfinished := [layer for layer, stop in at.items() if stop < push.stop]:
            if job.cancelled or monotonic() - job.heard > self._patience:
                raise TransferError("aborted", "the reader has cancelled it, or is gone")
            wrote, longest = False, STARTED_SECONDS
            try:
                with self._producer.use_lease(push.request, push.reader) as lease:
                    computed = push.stop
                    for layer in unfinished:
                        if at[layer] >= computed:
                            # The device computes the layers in order, and has not computed the
                            # previous one.
                            continue
                        computed = min(push.stop, lease.ready_tokens([layer]))
                        if computed > at[layer] and not job.cancelled:
                            written = self._write(
                                job, layers[layer], lease.blocks, at[layer], computed
                            )
                            # The blocks may belong to another prompt by now.
                            lease.raise_if_revoked()
                            size += written
                            at[layer], wrote = computed, True
            except NotReadyError:  # Not started, or preempted: it continues in other blocks.
                longest = WAITING_SECONDS
            if wrote:
                pause = POLL_SECONDS
                continue
            pause, before = min(2 * pause, longest), steps
            if (steps := self._producer.steps.wait(before, pause)) != before:
                pause = POLL_SECONDS
        return size

    def _write(self, job: Job, indices: list[int], blocks: list[int], start: int, stop: int) -> int:
        push, cache = job.push, self._producer.cache
        regions = [push.regions[place] for place in indices]
        sizes = cache.token_sizes(regions, cache.heads.num)
        slots = cache.slot_mapping(blocks, start, stop, cache.region_groups[regions[0]]).numpy()
        local = Placement(
            [self._producer.memory[index] for index in regions], cache.block_tokens, slots
        )
        remote_slots = token_slots(
            push.blocks, push.block_size, start - push.start, stop - push.start
        )
        remote = Placement(
            [push.memory[place] for place in indices], push.block_tokens, remote_slots
        )
        runs = plan_runs(remote, local, sizes)
        try:
            self._producer.transport.write(push.session, runs)
        except Exception as error:
            job.settled, job.failed = getattr(error, "settled", never), monotonic()
            raise
        return runs.total
