# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Copies of KV cache blocks between NPU and host memory, for vLLM's OffloadingConnector."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import torch
from ascend_platform import extension
from ascend_transfer.errors import one_line
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

HOST_REGISTER_MAPPED = 0x2
"""ACL_HOST_REG_MAPPED, a flag of aclrtHostRegisterV2; source: torch_npu's
``test/npu/test_npurt.py``."""

COPY_SECONDS = 120.0
"""Timeout of a job from its start to its end, with all jobs before it."""

SHUTDOWN_SECONDS = 10.0
"""The same at shutdown, after which host memory is kept for the life of the process."""

POLL_SECONDS = 0.0005
"""Interval at which the end of copies is queried."""

PAUSE_SECONDS = 1.0
"""Time in which a late job may still end."""

FAILURES = {
    True: (
        "stored to host memory",
        "its blocks are not offloaded",
        "check the NPU with npu-smi info",
    ),
    False: (
        "loaded from host memory",
        "its request fails, or with kv_load_failure_policy recompute is computed",
        "set this policy in --kv-transfer-config, and check the NPU with npu-smi info",
    ),
}
"""Failed operation, its effect and the fix, of stores and of loads."""

_kept: list[Any] = []
"""Memory that copies which have not ended may still access: kept for the life of the process."""


@dataclass
class CopyJob:
    """Copies of one transfer job, which should end ``until``, in monotonic seconds.

    Once it has ended, ``failed`` is the error in one line, or "" and ``seconds`` is its duration.
    """

    store: bool
    began: Any
    ended: Any
    launched: Future[int]
    until: float
    failed: str = ""
    seconds: float = 0.0

    def has_ended(self) -> bool:
        """Whether nothing is copied any more."""
        if not self.launched.done():
            return False
        try:
            self.launched.result()
            if not self.ended.query():
                return False
            self.seconds = self.began.elapsed_time(self.ended) / 1000
        except Exception as error:
            self.failed = one_line(error)
        return True


class Direction:
    """Copies to the host, or from it: a stream, and the thread that launches them.

    It is a daemon, so that a launch that never returns does not keep the process from ending.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.npu.Stream(device)
        self._work: queue.SimpleQueue[tuple[Future[int], Callable[[], int]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="kv-copy", daemon=True).start()

    def submit(self, launch: Callable[[], int]) -> Future[int]:
        launched: Future[int] = Future()
        self._work.put((launched, launch))
        return launched

    def close(self) -> None:
        """End the thread after what was submitted."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            launched, launch = work
            try:
                launched.set_result(launch())
            except Exception as error:
                launched.set_exception(error)


class HostWorker(OffloadingWorker):
    """Copies blocks between NPU and pinned host memory, in each direction in the order of the jobs.

    Each direction has a stream and a thread, because launches for a long prompt take tens of
    milliseconds. vLLM's connector asserts that every job succeeds, so that failed ones are reported
    as ended, and by :meth:`pop_failed` as failed.

    ``pages[i]`` is ``[blocks, bytes]`` on the NPU, ``host[i]`` ``[chunks, blocks_per_chunk,
    bytes]``; ``groups`` has the indices of each KV cache group's pages.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, host: Sequence[torch.Tensor]) -> None:
        self.pages = [cache.tensor for cache in kv_caches.tensors]
        self.host = list(host)
        self.groups = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        self.blocks_per_chunk = self.host[0].shape[1]
        self._loads, self._stores = (Direction(self.pages[0].device) for _ in range(2))
        self._jobs: dict[int, CopyJob] = {}
        self._failed: set[int] = set()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._enqueue(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **later: Any) -> bool:
        """Start a load. ``later``: vLLM 0.33 passes whether it is urgent; jobs keep their order
        here."""
        return self._enqueue(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call. Of failed ones nothing is copied any more.

        Raises:
            RefusedError: a job has not ended in time.
        """
        self._check_in_time()
        finished = []
        for number in [number for number, job in self._jobs.items() if job.has_ended()]:
            job = self._jobs.pop(number)
            if not job.failed:
                size = job.launched.result()
                finished.append(TransferResult(number, True, size, job.seconds))
                continue
            what, effect, fix = FAILURES[job.store]
            extension.logger.error(
                "OffloadingConnector: KV cache was not %s: %s; %s; fix: %s",
                what,
                job.failed,
                effect,
                fix,
            )
            self._failed.add(number)
            finished.append(TransferResult(number, True))
        return finished

    def pop_failed(self) -> set[int]:
        """Failed jobs of :meth:`get_finished` since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Wait for the end of jobs, also failed ones.

        Raises:
            RefusedError: some have not ended in time.
        """
        jobs = [self._jobs[number] for number in job_ids & self._jobs.keys()]
        if not _all_end(jobs, COPY_SECONDS):
            raise _late(jobs)

    def shutdown(self) -> None:
        self._end_copies()

    def _end_copies(self) -> bool:
        """End the threads, and let go of the memory; False if copies may still access it."""
        for direction in (self._loads, self._stores):
            direction.close()
        jobs = list(self._jobs.values())
        if not (ended := _all_end(jobs, SHUTDOWN_SECONDS)):
            extension.logger.warning(
                "OffloadingConnector: %d copies of KV cache between NPU and host have not ended in"
                " %g s; their memory is kept until the process ends",
                sum(not job.has_ended() for job in jobs),
                SHUTDOWN_SECONDS,
            )
            _kept.extend([*self.pages, *self.host])
        self._jobs.clear()
        self.pages.clear()
        self.host.clear()
        return ended

    def _check_in_time(self) -> None:
        late = [job for job in self._jobs.values() if job.until < monotonic()]
        # After a pause of this process they end soon.
        if late and not _all_end(late, PAUSE_SECONDS):
            raise _late(late)

    def _enqueue(self, job: int, blocks: Any, chunks: Any, store: bool) -> bool:
        direction = self._stores if store else self._loads
        after = torch.npu.Event()
        began, ended = (torch.npu.Event(enable_timing=True) for _ in range(2))
        after.record()
        runs = self._runs(blocks, chunks)

        def launch() -> int:
            torch.npu.set_device(direction.device)
            with torch.npu.stream(direction.stream):
                direction.stream.wait_event(after)
                began.record()
                try:
                    size = sum(self._copy(group, *run, store) for group, run in runs)
                except Exception:
                    # Copies before the error must not be made later.
                    direction.stream.synchronize()
                    raise
                ended.record()
            return size

        until = monotonic() + COPY_SECONDS
        self._jobs[job] = CopyJob(store, began, ended, direction.submit(launch), until)
        return True

    def _copy(self, group: int, block: int, row: int, count: int, store: bool) -> int:
        """Copy consecutive blocks to or from consecutive rows, for all pages of a group; returns
        the number of bytes."""
        size = 0
        for index in self.groups[group]:
            page, host = self.pages[index], self.host[index]
            if host.is_contiguous():
                rows_of_host = host.view(-1, host.shape[-1])
                pairs = [(page[block : block + count], rows_of_host[row : row + count])]
            else:  # A copy of several non-contiguous rows would need a temporary tensor.
                rows = [divmod(row + number, self.blocks_per_chunk) for number in range(count)]
                pairs = [(page[block + number], host[place]) for number, place in enumerate(rows)]
            for part, there in pairs:
                to, origin = (there, part) if store else (part, there)
                to.copy_(origin, non_blocking=True)
                size += part.numel()
        return size

    def _runs(self, blocks: Any, chunks: Any) -> list[tuple[int, tuple[int, int, int]]]:
        """Group, and first block, first host row and number of blocks of each run that is
        consecutive on both sides."""
        block_ids, chunk_ids = iter(blocks.block_ids.tolist()), iter(chunks.block_ids.tolist())
        chunk = 0
        runs: list[tuple[int, tuple[int, int, int]]] = []
        for group, (count, first) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            begins = len(runs)
            # `first` is a block index in the request; chunks are aligned to their size.
            for place in range(first, first + count):
                block, within = next(block_ids), place % self.blocks_per_chunk
                if not within or place == first:
                    chunk = next(chunk_ids)
                row = chunk * self.blocks_per_chunk + within
                if len(runs) > begins:
                    _, (start, start_row, length) = runs[-1]
                    if (block, row) == (start + length, start_row + length):
                        runs[-1] = group, (start, start_row, length + 1)
                        continue
                runs.append((group, (block, row, 1)))
        return runs


class RegionWorker(HostWorker):
    """HostWorker on host memory that is shared with the scheduler's process."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        host: Sequence[torch.Tensor],
        region: SharedOffloadRegion,
    ) -> None:
        super().__init__(kv_caches, host)
        self._region: SharedOffloadRegion | None = region
        self._address = region._base.data_ptr()
        if code := torch.npu.npurt().npuHostRegister(
            self._address, region.total_size_bytes, HOST_REGISTER_MAPPED
        ):
            extension.logger.warning(
                "aclrtHostRegister failed with code %d for %d bytes of host memory; KV cache copies"
                " will block steps",
                code,
                region.total_size_bytes,
            )
            self._address = 0

    def shutdown(self) -> None:
        region, self._region = self._region, None
        if not self._end_copies():
            _kept.append(region)
            return
        if region is None:
            return
        if self._address:
            torch.npu.npurt().npuHostUnregister(self._address)
        region._creator = region._creator and os.path.exists(region.mmap_path)
        region.cleanup()


def _all_end(jobs: Iterable[CopyJob], seconds: float) -> bool:
    """Wait until the jobs have ended; False if some have not in this time."""
    until, left = monotonic() + seconds, list(jobs)
    while left := [job for job in left if not job.has_ended()]:
        if monotonic() >= until:
            return False
        sleep(POLL_SECONDS)
    return True


def _late(jobs: Iterable[CopyJob]) -> extension.RefusedError:
    left = [job for job in jobs if not job.has_ended()]
    return extension.RefusedError(
        f"OffloadingConnector: {len(left)} copies of KV cache between NPU and host have not ended;"
        f" they may take {COPY_SECONDS:g} s; fix: check the NPU with npu-smi info, and restart the"
        " engine"
    )
