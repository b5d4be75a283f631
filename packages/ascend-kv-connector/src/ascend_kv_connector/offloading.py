# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's OffloadingConnector for NPUs: host memory as a second tier of prefix cache.

Bookkeeping, eviction, metrics, options and the tiers behind host memory are vLLM's
(``vllm/v1/kv_offload``). The block copies between device and host, CUDA kernels in vLLM, are done
by PyTorch (:mod:`~ascend_kv_connector.host_worker`). A layer's block is two pages, keys and values.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from ascend_platform import extension
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from ascend_kv_connector.config import sliding_windows
from ascend_kv_connector.host_worker import HostWorker, RegionWorker
from ascend_kv_connector.store.identity import identity_digest
from ascend_kv_connector.versions import of_engine

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


@dataclass
class WorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata, and the jobs in ``completed_jobs`` of this step whose blocks were not stored."""

    failed_stores: set[int] = field(default_factory=set)

    @classmethod
    def extend(cls, known: Any, failed: set[int]) -> WorkerMetadata:
        """vLLM's metadata with the failed jobs."""
        names = (each.name for each in fields(OffloadingWorkerMetadata))
        return cls(**{name: getattr(known, name) for name in names}, failed_stores=failed)

    def aggregate(self, other: Any) -> WorkerMetadata:
        merged = super().aggregate(other)
        return self.extend(merged, self.failed_stores | other.failed_stores)


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
            kv_instance=vllm_config.instance_id,
        )
        if not all("identity" in tier for tier in extra_config.get("secondary_tiers", ())):
            extra_config["kv_identity"] = identity_digest(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed_stores: set[int] = set()
        self._failed_keys: set[Any] = set()
        if self.connector_scheduler is not None:
            manager: Any = self.connector_scheduler.manager
            manager.complete_store = partial(self._complete_store, manager.complete_store)
            self._versions = of_engine(vllm_config)

    def on_new_request(self, request: Any) -> None:
        self._versions.on_new_request(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Like the base method, by the current hashes of the request: it may have been looked up
        before weights or its adapter were replaced."""
        for config, group in zip(
            self.scheduler.config.kv_group_configs,
            self.scheduler._req_status[request.request_id].group_states,
            strict=True,
        ):
            first = request.block_hashes[config.hashes_per_chunk - 1 :][:1]
            if group.offload_keys and first != [get_offload_block_hash(group.offload_keys[0])]:
                group.offload_keys.clear()
                group.next_stored_chunk_idx = 0
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Like the base method, but store nothing more of requests that were computed in part with
        weights or adapters that have been replaced since."""
        states = self.scheduler._req_status.values()
        stale = {id(each) for each in self._versions.stale(state.req for state in states)}
        for state in states:
            if id(state.req) in stale:
                state.max_load_tokens = state.max_offload_tokens = 0
        return super().build_connector_meta(scheduler_output)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Like the base method, with the requests of failed loads; the scheduler fails them or
        computes their prompts (``kv_load_failure_policy``)."""
        assert self.connector_worker is not None
        loads = dict(self.connector_worker._load_jobs)
        results = super().get_transfer_results(finished_req_ids)
        worker = self.connector_worker.worker
        failed = worker.pop_failed() if isinstance(worker, HostWorker) else set()
        requests = {loads[job] for job in failed & loads.keys()}
        if None in requests:  # vLLM 0.33: the step that waited for the load has read its blocks.
            raise extension.RefusedError(
                "OffloadingConnector: KV cache was not loaded before the step that reads it"
                " (sync_load_budget_bytes); fix: check the NPU with npu-smi info, and restart the"
                " engine"
            )
        results.failed_recving |= requests
        self._failed_stores |= failed - loads.keys()
        return results

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        metadata = super().build_connector_worker_meta()
        if metadata is None:
            return None
        failed, self._failed_stores = self._failed_stores, set()
        return WorkerMetadata.extend(metadata, failed)

    def update_connector_output(self, connector_output: Any) -> None:
        jobs, states = self.scheduler._jobs, self.scheduler._req_status
        metadata = connector_output.kv_connector_worker_meta
        for number in metadata.failed_stores if metadata else ():
            if number in jobs:  # otherwise the cache was reset
                self._failed_keys |= set(jobs[number].keys)
        for request in connector_output.failed_recving:
            if request in states and states[request].transfer_jobs:  # not another connector's
                # It would be loaded again, and might fail again, forever.
                states[request].max_load_tokens = 0
        super().update_connector_output(connector_output)

    def _complete_store(
        self,
        complete: Callable[..., None],
        keys: Collection[Any],
        *context: Any,
        success: bool = True,
    ) -> None:
        """The manager's method of this name, to which vLLM's scheduler reports success for all
        stores."""
        failed = self._failed_keys.intersection(keys)
        self._failed_keys -= failed
        complete(keys, *context, success=success and not failed)

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
        # Two instances on a machine may have been given one engine_id.
        engine = f"{config.engine_id}-{config.extra_config.get('kv_instance', '')}"
        super().__init__(replace(config, model=model, parallel=parallel, engine_id=engine))
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
