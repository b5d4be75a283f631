# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Secondary tier over a pool (``vllm/v1/kv_offload/tiering``): jobs, deadlines, verification and
outcomes.

vLLM's manager, in the scheduler's process, looks up chunks in a tier and lends it rows of host
memory to copy from or to. Each of these operations ends before its deadline whatever the pool does,
and a chunk counts as loaded only if its checksum matches: threads copy through private buffers, and
access a lent row only while its job is open.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from time import monotonic, sleep
from typing import Any, ClassVar

import numpy as np
from ascend_platform import extension
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadKey,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from ascend_kv_connector.config import Positive, Seconds
from ascend_kv_connector.store.chunk_format import (
    FOOTER_BYTES,
    ChunkNames,
    is_intact,
    read_footer,
    write_footer,
)
from ascend_kv_connector.store.pool import LOADED, STORED, Pool, PoolError

CHUNKS_METRIC = "vllm:ascend_store_chunks"
"""Metric: chunks by tier, operation, outcome and the pool's error code."""

BATCH_BYTES = 16 << 20
"""Bytes that a thread transfers at once, unless one chunk is larger."""

FACTORY_KEYS = {"type", "module_path", "backpressure"}
"""Keys of a tier's entry that vLLM's factory keeps (``tiering/factory.py``)."""

BROKEN = ("cut", "corrupt")
NO_REPLY = object()


@dataclass
class Job:
    """A job of vLLM: ``rows[i]`` of host memory is the chunk of ``keys[i]``. Times are
    ``monotonic`` seconds."""

    keys: list[OffloadKey]
    names: list[str]
    rows: list[int]
    load: bool
    deadline: float
    done: list[OffloadKey] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: bool = True

    @property
    def op(self) -> str:
        return "load" if self.load else "store"


class PoolLookups(AsyncLookupManager):
    """vLLM's lookup thread, which keeps the scheduler from waiting."""

    def __init__(self, tier: PoolTier) -> None:
        self._tier = tier
        super().__init__(tier.tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: Any) -> Iterable[bool]:
        return self._tier.lookup_keys(keys)


@dataclass(frozen=True)
class TierOptions:
    """Keys of a tier's entry in ``secondary_tiers``.

    ``answer_timeout``: seconds for a lookup. ``transfer_timeout``: seconds for a job, the chunks of
    a request. ``rest``: seconds of backoff from a pool that did not respond, in which prompts are
    computed. ``threads``: number of load threads, and of store threads. ``identity``: see
    :class:`~ascend_kv_connector.store.chunk_format.ChunkNames`. ``kv_events``: note events for
    vLLM's ``--kv-events-config``.
    """

    answer_timeout: Seconds = 5.0
    transfer_timeout: Seconds = 20.0
    rest: Seconds = 10.0
    threads: Positive = 2
    identity: dict[str, Any] = field(default_factory=dict)
    kv_events: bool = False


class PoolTier(SecondaryTierManager):
    """Secondary tier over a pool; ``options`` are those of TierOptions. ``entry``: the keys of its
    entry in ``secondary_tiers``, with the pool's own."""

    medium: ClassVar[Medium | None] = None
    entry: ClassVar[type[TierOptions]] = TierOptions

    @classmethod
    def check_entry(cls, entry: Mapping[str, Any], where: str) -> None:
        """Validate a tier's entry; ``where`` it is, for messages.

        Raises:
            RefusedError: an unknown key, or an invalid value, in one line.
        """
        extension.parse_options(
            cls.entry, {key: entry[key] for key in entry.keys() - FACTORY_KEYS}, where
        )

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        pool: Pool,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options, self._pool = TierOptions(**options), pool
        self.names = ChunkNames(offloading_spec, self._options.identity)
        self._size = self.block_size_bytes + FOOTER_BYTES
        self._batch = max(1, BATCH_BYTES // self._size)
        self._threads = DualQueueThreadPool(
            self._options.threads, self._options.threads, thread_name_prefix=f"kv_{tier_type}"
        )
        self._local = threading.local()
        self._jobs: dict[int, Job] = {}
        self._ended: list[JobResult] = []
        self._backoff_until = self._full_until = 0.0
        self._lookup_thread: threading.Thread | None = None
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._events: list[OffloadingEvent] | None = [] if self._options.kv_events else None
        self._counting = threading.Lock()
        self._lookups = PoolLookups(self)
        extension.logger.info(
            "%s stores KV cache under %s; instances with the same name share it",
            pool.description,
            self.names.prefix,
        )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        text = (
            "KV cache chunks in a pool by operation (lookup, store, load), its outcome and the"
            " pool's error code."
        )
        return {
            CHUNKS_METRIC: OffloadingCounterMetadata(
                documentation=text, labelnames=("tier", "op", "outcome", "code")
            )
        }

    # Called by vLLM's manager, in the scheduler's thread.

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        exists = self._lookups.lookup(key, req_context)
        if exists is None:
            return LookupResult.RETRY
        return LookupResult.HIT if exists and not self.is_backing_off else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, load=True)

    def get_finished_jobs(self) -> list[JobResult]:
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks that were stored, or removed because they were corrupt; vLLM publishes them for
        routers."""
        with self._counting:
            events, self._events = self._events or [], None if self._events is None else []
        return events

    def drain_jobs(self) -> None:
        """Finish all jobs, in their time at most; then switch to new names.

        vLLM calls this when existing KV cache must not be used any more, such as after a weight
        update (``reset_cache``).
        """
        while self._jobs:
            self._collect()
            sleep(0.001)
        self.names.rotate()
        extension.logger.info(
            "the KV cache was reset; it is now stored under %s in %s",
            self.names.prefix,
            self._pool.description,
        )

    def get_stats(self) -> OffloadingConnectorStats | None:
        with self._counting:
            counts, self._counts = self._counts, Counter()
        stats = OffloadingConnectorStats()
        for labels, count in counts.items():
            stats.increase_counter(CHUNKS_METRIC, count, (self.tier_type, *labels))
        return stats

    def shutdown(self) -> None:
        for job in self._jobs.values():
            with job.lock:
                job.open = False
        self._jobs.clear()
        self._threads.shutdown(wait=False)
        # Lookups that wait are not made.
        self._backoff_until = inf
        self._lookups.shutdown()
        until = monotonic() + self._options.answer_timeout
        asking = [*self._threads._threads, *([self._lookup_thread] if self._lookup_thread else [])]
        for thread in asking:
            thread.join(max(0.0, until - monotonic()))
        # A thread may still use the client; it ends with the process.
        if not any(thread.is_alive() for thread in asking):
            self._pool.close()

    # Backoff

    @property
    def is_backing_off(self) -> bool:
        return monotonic() < self._backoff_until

    def _back_off(self, why: str) -> None:
        with self._counting:
            if self.is_backing_off:
                return
            self._backoff_until = monotonic() + self._options.rest
        extension.logger.warning(
            "KV cache in %s: %s; not used for %g s, prompts are computed; check that it is alive"
            " and reachable",
            self._pool.description,
            why,
            self._options.rest,
        )

    def lookup_keys(self, keys: list[OffloadKey]) -> list[bool]:
        """Which chunks exist, within the timeout; none if the pool does not respond."""
        if self.is_backing_off:
            self._count("lookup", "skipped", number=len(keys))
            return [False] * len(keys)
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        names = [self.names(key) for key in keys]

        def ask() -> None:
            try:
                answer.put(self._pool.exists(names))
            except Exception as error:  # of any type; logged below
                answer.put(error)

        reply: Any = NO_REPLY
        # At most one lookup, even if it hangs.
        if self._lookup_thread is None or not self._lookup_thread.is_alive():
            thread = threading.Thread(target=ask, daemon=True, name="kv_ask")
            try:
                thread.start()
                self._lookup_thread = thread
                reply = answer.get(timeout=self._options.answer_timeout)
            except queue.Empty:
                pass
            except RuntimeError as error:  # too many processes and threads
                reply = error
        if isinstance(reply, list):
            self._count("lookup", "found", number=sum(reply))
            self._count("lookup", "missing", number=len(reply) - sum(reply))
            return reply
        self._count("lookup", "unanswered", number=len(keys))
        self._back_off(
            f"no answer in {self._options.answer_timeout:g} s" if reply is NO_REPLY else str(reply)
        )
        return [False] * len(keys)

    # Jobs

    def _submit(self, metadata: Any, load: bool) -> None:
        deadline = monotonic() + self._options.transfer_timeout
        keys = list(metadata.keys)
        job = Job(
            keys,
            [self.names(key) for key in keys],
            [int(row) for row in metadata.chunk_ids],
            load,
            deadline,
        )
        if not keys or self.is_backing_off or (not load and monotonic() < self._full_until):
            self._count(job.op, "skipped", number=len(job.keys))
            self._end(metadata.job_id, job)
            return
        self._jobs[metadata.job_id] = job
        move = self._load if load else self._store
        parts = [slice(at, at + self._batch) for at in range(0, len(job.keys), self._batch)]
        enqueue = self._threads.enqueue_load if load else self._threads.enqueue_store
        enqueue(
            metadata.job_id,
            len(parts),
            [functools.partial(self._move, move, job, part) for part in parts],
        )

    def _collect(self) -> None:
        for number, _, seconds in self._threads.get_finished():
            if job := self._jobs.pop(number, None):
                self._end(number, job, seconds)
        now = monotonic()
        for number, job in [each for each in self._jobs.items() if each[1].deadline < now]:
            with job.lock:  # Its rows are no longer accessed.
                job.open = False
            del self._jobs[number]
            self._count(job.op, "late", number=len(job.keys) - len(job.done))
            self._back_off(
                f"{len(job.keys)} chunks were not transferred in {self._options.transfer_timeout:g} s"
            )
            self._end(number, job)

    def _end(self, number: int, job: Job, seconds: float | None = None) -> None:
        done = set(job.done)
        failed = [key for key in job.keys if key not in done]
        if job.load and failed:
            self._lookups.mark_miss(failed)
        if not job.load:
            self._note_event(list(job.done), removed=False)
        size = len(job.done) * self.block_size_bytes
        self._ended.append(
            JobResult(
                number, not failed, (tuple(job.done) or None) if failed else None, seconds, size
            )
        )

    # In the pool's threads

    def _move(self, move: Callable[[Job, slice], None], job: Job, part: slice) -> None:
        try:
            move(job, part)
        except PoolError as error:
            self._back_off(str(error))
            self._count(job.op, "failed", number=len(job.keys[part]))
        except Exception as error:  # An error of the pool's client must not stop the engine.
            self._count(job.op, "failed", number=len(job.keys[part]))
            extension.logger.warning(
                "KV cache in %s: %s: %s", self._pool.description, type(error).__name__, error
            )

    def _store(self, job: Job, part: slice) -> None:
        chunks = list(zip(job.keys[part], job.names[part], job.rows[part], strict=True))
        there = self._pool.exists(job.names[part])
        self._count("store", "present", number=sum(there))
        done = [key for (key, _, _), has in zip(chunks, there, strict=True) if has]
        chunks = [chunk for chunk, has in zip(chunks, there, strict=True) if not has]
        records, names = self._record_buffers(len(chunks)), [name for _, name, _ in chunks]
        with job.lock:
            if not job.open:
                return
            host = np.asarray(self._primary_kv_view)
            for record, (_, name, row) in zip(records, chunks, strict=True):
                chunk = host[row].view(np.uint8)
                # unlike a memoryview, without the GIL
                np.copyto(np.asarray(record)[:-FOOTER_BYTES], chunk)
                # Of the row, not the buffer: a timed-out read may still write to the buffer.
                write_footer(name, record, memoryview(chunk))
        outcomes = self._pool.put(names, records) if chunks else []
        for (key, _, _), outcome in zip(chunks, outcomes, strict=True):
            self._count_outcome("store", outcome)
            if outcome == STORED:
                done.append(key)
        if "full" in outcomes:
            self._full_until = monotonic() + self._options.rest  # loads go on
        with job.lock:
            job.done += done

    def _load(self, job: Job, part: slice) -> None:
        names, records = job.names[part], self._record_buffers(len(job.names[part]))
        outcomes = self._pool.get(names, records)
        with job.lock:
            if not job.open:
                return
            host = np.asarray(self._primary_kv_view)
            for place, (key, row, record) in enumerate(
                zip(job.keys[part], job.rows[part], records, strict=True)
            ):
                if outcomes[place] != LOADED:
                    continue
                chunk, written = host[row].view(np.uint8), read_footer(record)
                np.copyto(chunk, np.asarray(record)[:-FOOTER_BYTES])
                # Check the row, not the buffer: a timed-out read may still write to the buffer.
                if is_intact(names[place], memoryview(chunk), written):
                    job.done.append(key)
                else:
                    outcomes[place] = "corrupt"
        for outcome in outcomes:
            self._count_outcome("load", outcome)
        if broken := [place for place, outcome in enumerate(outcomes) if outcome in BROKEN]:
            # This causes the chunk to be stored again.
            self._pool.remove([names[place] for place in broken])
            self._note_event([job.keys[part][place] for place in broken], removed=True)
            extension.logger.warning(
                "KV cache in %s: removed %d truncated or corrupt chunks",
                self._pool.description,
                len(broken),
            )

    def _record_buffers(self, count: int) -> list[memoryview]:
        """This thread's buffer as ``count`` records; earlier content is overwritten."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = self._pool.buffer(self._batch * self._size)
        return [
            self._local.buffer[place * self._size : (place + 1) * self._size]
            for place in range(count)
        ]

    def _count_outcome(self, op: str, outcome: str) -> None:
        word, _, code = outcome.partition(" ")
        self._count(op, word, code)

    def _count(self, op: str, outcome: str, code: str = "", number: int = 1) -> None:
        if number:
            with self._counting:
                self._counts[op, outcome, code] += number

    def _note_event(self, keys: list[OffloadKey], removed: bool) -> None:
        if keys and self._events is not None:
            medium = self.medium or Medium.CPU
            event = OffloadingEvent(keys, medium, removed, Locality.REMOTE, self.tier_type)
            with self._counting:
                self._events.append(event)
