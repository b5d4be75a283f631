# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's OffloadingConnector for NPUs: host memory as a second tier of prefix cache.

Bookkeeping, eviction, metrics, options and the tiers behind host memory are vLLM's
(``vllm/v1/kv_offload``). The block copies between device and host, CUDA kernels in vLLM, are done
here by PyTorch. A layer's block is two pages, keys and values.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from ascend_kv_connector.config import sliding_windows
from ascend_kv_connector.store.identity import identity_digest

SPECS = {"CPUOffloadingSpec": "HostSpec", "TieringOffloadingSpec": "TieredSpec"}
"""Spec used on NPUs, by vLLM's name."""

TIERS = {
    "ascend_disk": ("ascend_kv_connector.store.disk", "DiskTier"),
    "ascend_mooncake": ("ascend_kv_connector.store.mooncake", "MooncakeTier"),
}
"""Secondary tiers of this wheel, by ``type`` of an entry of ``secondary_tiers``."""

for _name, _place in TIERS.items():
    if _name not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(_name, *_place)

HOST_REGISTER_MAPPED = 0x2
"""ACL_HOST_REG_MAPPED, a flag of aclrtHostRegisterV2; source: torch_npu's
``test/npu/test_npurt.py``."""


class OffloadingConnector(offloading_connector.OffloadingConnector):
    """vLLM's OffloadingConnector with host memory (``cpu_bytes_to_use``, total of all ranks) and
    secondary tiers."""

    @classmethod
    def check_config(cls, vllm_config: Any) -> None:
        """Validate the configuration; the platform calls it before anything starts.

        Raises:
            RefusedError: an unsupported spec or layout of host memory, an invalid entry of a tier
            of this wheel, or tiers across several hosts, in one line.
        """
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        if (spec := extra_config.get("spec_name", "CPUOffloadingSpec")) not in (
            *SPECS,
            *SPECS.values(),
        ):
            raise extension.RefusedError(
                f"OffloadingConnector: spec_name is {spec!r}; supported on NPUs: CPUOffloadingSpec"
                " (default) and TieringOffloadingSpec; fix: set one of these"
            )
        if extra_config.get("canonical_layout"):
            raise extension.RefusedError(
                "OffloadingConnector: canonical_layout is not supported on NPUs: host memory has the"
                " blocks of each rank as they are, and tiers share them between equal parallel"
                " sizes; fix: remove it from kv_connector_extra_config"
            )
        if SPECS.get(spec, spec) == "TieredSpec":
            check_single_host("OffloadingConnector", vllm_config)
            check_tiers(extra_config.get("secondary_tiers", []))
        if vllm_config.cache_config.kv_offloading_size is None and not extra_config.get(
            "cpu_bytes_to_use"
        ):
            raise extension.RefusedError(
                "OffloadingConnector: cpu_bytes_to_use is not set; fix: set it in"
                " kv_connector_extra_config to the bytes of host memory for all ranks"
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None  # The attention backend's own tensors, with separate keys and values.

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        sliding_windows(type(self).__name__, kv_cache_config.kv_cache_groups)
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        spec = extra_config.get("spec_name", "CPUOffloadingSpec")
        extra_config.update(
            spec_name=SPECS.get(spec, spec),
            spec_module_path=__name__,
            kv_format=kv_format(vllm_config),
        )
        if not all("identity" in tier for tier in extra_config.get("secondary_tiers", ())):
            extra_config["kv_identity"] = identity_digest(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register each page tensor once: layers of several groups may share memory, as a block
        belongs to one group.

        A page is of the scheduler's block, which may be several contiguous blocks of the attention
        (``vllm/v1/worker/utils.py``, ``prepare_kernel_block_sizes``).
        """
        assert self.connector_worker is not None
        config = self.connector_worker.kv_cache_config
        tensors: dict[int, CanonicalKVCacheTensor] = {}
        refs = []
        for group in config.kv_cache_groups:
            parts = [
                part
                for layer in group.layer_names
                for part in extension.cache_parts(kv_caches[layer]).values()
            ]
            pages = [part.view(torch.int8).view(config.num_blocks, -1) for part in parts]
            for page in pages:
                tensors.setdefault(page.data_ptr(), CanonicalKVCacheTensor(page, page.shape[1]))
            addresses = list(tensors)
            refs.append(
                [
                    CanonicalKVCacheRef(addresses.index(page.data_ptr()), page.shape[1])
                    for page in pages
                ]
            )
        self.connector_worker._init_worker(CanonicalKVCaches(list(tensors.values()), refs))


class HostSpec(CPUOffloadingSpec):
    """vLLM's host memory management with :class:`HostWorker` for the copies."""

    _worker: Any  # vLLM declares a worker for CUDA

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostWorker:
        if not self._worker:
            shape = self.num_chunks, self.blocks_per_chunk
            host = [
                torch.zeros(*shape, cache.tensor.shape[1], dtype=torch.int8, pin_memory=True)
                for cache in kv_caches.tensors
            ]
            self._worker = HostWorker(kv_caches, host)
        return self._worker


class TieredSpec(TieringOffloadingSpec):
    """vLLM's tiered offloading; host memory is one file in /dev/shm that all ranks and the
    scheduler map."""

    _worker: Any  # vLLM declares a worker for CUDA

    def __init__(self, config: Any) -> None:
        # Tiers name a KV cache by its model and dtype, which is not that of int8 latents.
        model, form = config.model, config.extra_config.get("kv_format", "")
        known = f"{config.worker_kv_bytes_per_block} bytes"
        if identity := config.extra_config.get("kv_identity"):
            known += f", {identity}"
        model = replace(model, name=f"{model.name}{form}", dtype=f"{model.dtype}, {known}")
        # A block has the keys of all heads of a rank, then the values.
        parallel = replace(config.parallel, is_parallelism_agnostic=False)
        super().__init__(replace(config, model=model, parallel=parallel))
        if self.num_chunks < 1 and self.kv_bytes_per_chunk:
            raise extension.RefusedError(
                f"cpu_bytes_to_use is {self.extra_config['cpu_bytes_to_use']}, less than a chunk of"
                f" {self.blocks_per_chunk} blocks, which has {self.kv_bytes_per_chunk} bytes in all"
                " ranks; fix: increase it"
            )

    def get_manager(self) -> Any:
        is_new = self._manager is None
        manager = super().get_manager()
        if is_new and self._scheduler_mmap is not None and not self._scheduler_mmap._creator:
            # The workers, created first, have mapped it. Unlinked, the kernel frees it however the
            # processes end.
            _unlink(self._scheduler_mmap)
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                # Of latents, which are equal on all ranks, vLLM stores those of rank 0.
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            pages = [cache.tensor.shape[1] for cache in kv_caches.tensors]
            blocks = self.blocks_per_chunk
            host = [
                region.create_next_worker_view(page * blocks).unflatten(1, (blocks, page))
                for page in pages
            ]
            self._worker = RegionWorker(kv_caches, host, region)
        return self._worker


def kv_format(vllm_config: Any) -> str:
    """Suffix of a model's name in tiers, for what its size and parallel sizes do not tell of a
    block: the order of rotated keys, and which tokens a rank has."""
    parallel, order = vllm_config.parallel_config, extension.rope_order(vllm_config)
    form = f"-{order}" if order != "pairs" else ""
    if parallel.decode_context_parallel_size > 1:
        form += f"-interleave{parallel.cp_kv_cache_interleave_size}"
    return form


def _unlink(region: SharedOffloadRegion) -> None:
    # vLLM 0.33 has several
    for path in [path for path, *_ in getattr(region, "_segments", ())] or [region.mmap_path]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def check_tiers(tiers: Any) -> None:
    """Validate the entries of this wheel's tiers; the others check their own.

    Raises:
        RefusedError: an invalid one, in one line.
    """
    if not isinstance(tiers, list) or not all(isinstance(tier, dict) for tier in tiers):
        raise extension.RefusedError(
            f"OffloadingConnector: secondary_tiers is {tiers!r}; supported: a list of objects; fix:"
            ' write [{"type": …}]'
        )
    for number, tier in enumerate(tiers):
        if (name := tier.get("type")) in TIERS:
            module, cls = TIERS[name]
            where = f"OffloadingConnector: secondary_tiers[{number}]"
            getattr(importlib.import_module(module), cls).check_entry(tier, where)


def check_single_host(name: str, vllm_config: Any) -> None:
    """Check that all ranks can map the same memory.

    Raises:
        RefusedError: the instance spans several hosts, in one line.
    """
    if (nodes := vllm_config.parallel_config.nnodes_within_dp) > 1:
        raise extension.RefusedError(
            f"{name}: the instance spans {nodes} machines; its ranks share host memory; fix: use one"
            " machine for an instance, and a pool for several instances"
        )


@dataclass
class CopyJob:
    """Copies of one transfer job. ``size`` is in bytes, and valid after launch."""

    began: Any
    ended: Any
    launched: Future[int]

    def has_ended(self) -> bool:
        return self.launched.done() and (
            self.launched.exception() is not None or self.ended.query()
        )


class Direction:
    """Copies to the host, or from it: a stream, and the thread that launches them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.npu.Stream(device)
        self.thread = ThreadPoolExecutor(1, "kv-copy")


class HostWorker(OffloadingWorker):
    """Copies blocks between NPU and pinned host memory, in each direction in the order of the jobs.

    Each direction has a stream and a thread, because launches for a long prompt take tens of
    milliseconds.

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

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._enqueue(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **later: Any) -> bool:
        """Start a load. ``later``: vLLM 0.33 passes whether it is urgent; jobs keep their order
        here."""
        return self._enqueue(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        ended = []
        for number in [number for number, job in self._jobs.items() if job.has_ended()]:
            job = self._jobs.pop(number)
            if (error := job.launched.exception()) is not None:
                extension.logger.error(
                    "KV cache was not copied between NPU and host: %s: %s",
                    type(error).__name__,
                    error,
                )
                ended.append(TransferResult(number, False))
                continue
            seconds = job.began.elapsed_time(job.ended) / 1000
            ended.append(TransferResult(number, True, job.launched.result(), seconds))
        return ended

    def wait(self, job_ids: set[int]) -> None:
        for number in job_ids & self._jobs.keys():
            if self._jobs[number].launched.exception() is None:
                self._jobs[number].ended.synchronize()

    def shutdown(self) -> None:
        for direction in (self._loads, self._stores):
            direction.thread.shutdown()
            direction.stream.synchronize()
        self._jobs.clear()
        self.pages.clear()
        self.host.clear()

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
                size = sum(self._copy(group, *run, store) for group, run in runs)
                ended.record()
            return size

        self._jobs[job] = CopyJob(began, ended, direction.thread.submit(launch))
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
        super().shutdown()
        region, self._region = self._region, None
        if region is None:
            return
        if self._address:
            torch.npu.npurt().npuHostUnregister(self._address)
        region._creator = region._creator and os.path.exists(region.mmap_path)
        region.cleanup()
