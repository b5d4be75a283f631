"""vLLM's OffloadingConnector with the NPU's part: host memory as a second tier of prefix cache, behind the NPU's own.

Bookkeeping, eviction, metrics and options are vLLM's (``vllm/v1/kv_offload``); what CUDA's kernels do there, copies of blocks
between NPU and host, is done here with PyTorch alone. A block of a layer is two pages, its keys and its values.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from ascend_platform import extension
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from ascend_kv_connector.config import check_cache

SPEC = {"spec_name": "HostSpec", "spec_module_path": __name__}


class OffloadingConnector(offloading_connector.OffloadingConnector):
    """As vLLM's, for host memory (``cpu_bytes_to_use``, the bytes of all ranks)."""

    @classmethod
    def check_config(cls, vllm_config: Any) -> None:
        """Asked by the platform before anything starts.

        Raises:
            RefusedError: another tier than host memory, in one line.
        """
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        if (spec := given.get("spec_name", "CPUOffloadingSpec")) not in ("CPUOffloadingSpec", SPEC["spec_name"]):
            raise extension.RefusedError(
                f"OffloadingConnector: spec_name is {spec!r}; on NPUs it can be CPUOffloadingSpec, which is its default"
            )
        if vllm_config.cache_config.kv_offloading_size is None and not given.get("cpu_bytes_to_use"):
            raise extension.RefusedError(
                "OffloadingConnector: kv_connector_extra_config has no cpu_bytes_to_use, the bytes of host memory for all ranks"
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None  # attention's own; keys and values are taken apart in it

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_cache("OffloadingConnector", kv_cache_config)
        vllm_config.kv_transfer_config.kv_connector_extra_config.update(SPEC)
        super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        tensors, refs = [], []
        for held in kv_caches.values():
            for part in extension.cache_parts(held).values():
                pages = part.view(torch.int8).flatten(1)
                refs.append(CanonicalKVCacheRef(len(tensors), pages.shape[1]))
                tensors.append(CanonicalKVCacheTensor(pages, pages.shape[1]))
        self.connector_worker._init_worker(CanonicalKVCaches(tensors, [refs]))


class HostSpec(CPUOffloadingSpec):
    """vLLM's bookkeeping of host memory, with :class:`HostWorker` for the copies."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostWorker:
        if not self._worker:
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker


@dataclass
class Copies:
    """What one job has enqueued."""

    job: int
    began: Any
    ended: Any
    size: int


class HostWorker(OffloadingWorker):
    """Copies blocks between the NPU and pinned host memory, in the order of the jobs, on a stream of its own.

    ``pages[i]`` is ``[blocks, bytes]`` on the NPU, ``host[i]`` ``[chunks * blocks_per_chunk, bytes]``.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        self.pages = [cache.tensor for cache in kv_caches.tensors]
        self.blocks_per_chunk = blocks_per_chunk
        self.host = [
            torch.zeros(chunks * blocks_per_chunk, page.shape[1], dtype=torch.int8, pin_memory=True) for page in self.pages
        ]
        self._stream = torch.npu.Stream(self.pages[0].device)
        self._jobs: deque[Copies] = deque()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._enqueue(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **later: Any) -> bool:
        """``later``: vLLM 0.33 says whether a load is urgent; jobs keep their order here."""
        return self._enqueue(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        ended = []
        while self._jobs and self._jobs[0].ended.query():
            job = self._jobs.popleft()
            ended.append(TransferResult(job.job, True, job.size, job.began.elapsed_time(job.ended) / 1000))
        return ended

    def wait(self, job_ids: set[int]) -> None:
        for job in self._jobs:
            if job.job in job_ids:
                job.ended.synchronize()

    def shutdown(self) -> None:
        self._stream.synchronize()
        self._jobs.clear()
        self.pages.clear()
        self.host.clear()

    def _enqueue(self, job: int, blocks: Any, chunks: Any, store: bool) -> bool:
        (first,) = blocks.block_indices  # where in the request, counted in blocks; chunks begin at multiples of their size
        skip = first % self.blocks_per_chunk
        began, ended = (torch.npu.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(self._stream):
            began.record()
            for place, block in enumerate(blocks.block_ids.tolist(), skip):
                chunk, within = divmod(place, self.blocks_per_chunk)
                row = int(chunks.block_ids[chunk]) * self.blocks_per_chunk + within
                for page, host in zip(self.pages, self.host, strict=True):
                    to, origin = (host[row], page[block]) if store else (page[block], host[row])
                    to.copy_(origin, non_blocking=True)
            ended.record()
        size = len(blocks.block_ids) * sum(page.shape[1] for page in self.pages)
        self._jobs.append(Copies(job, began, ended, size))
        return True
