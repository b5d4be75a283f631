# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Copies between NPU and host memory."""

import ctypes
import dataclasses
import importlib
import inspect
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ascend_kv_connector.host_worker import HostWorker
from ascend_kv_connector.offloading import TieredSpec, kv_format
from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.file_mapper import FileMapper

SIZE, PER_CHUNK = 64, 2


def places(*ids: int, first: int = 0) -> Any:
    """Blocks of one group, from block ``first`` of a request on, or chunks."""
    return SimpleNamespace(block_ids=np.array(ids), group_sizes=[len(ids)], block_indices=[first])


@pytest.fixture(params=["contiguous", "rows of a shared region"])
def worker(request: pytest.FixtureRequest) -> Iterator[HostWorker]:
    pages = [
        torch.arange(20 * SIZE).remainder(113).to(torch.int8).view(20, SIZE).npu() + part
        for part in range(2)
    ]
    tensors = [CanonicalKVCacheTensor(page, SIZE) for page in pages]
    caches = CanonicalKVCaches(
        tensors, [[CanonicalKVCacheRef(0, SIZE), CanonicalKVCacheRef(1, SIZE)]]
    )
    if request.param == "contiguous":
        host = [
            torch.zeros(10, PER_CHUNK, SIZE, dtype=torch.int8, pin_memory=True) for _ in range(2)
        ]
    else:
        rows = torch.zeros(10, 2, PER_CHUNK, SIZE, dtype=torch.int8, pin_memory=True)
        host = [rows[:, part] for part in range(2)]
    copier = HostWorker(caches, host)
    yield copier
    copier.shutdown()


def finish(worker: HostWorker, count: int, seconds: float = 30.0) -> list[int]:
    ended: list[int] = []
    until = monotonic() + seconds
    while len(ended) < count and monotonic() < until:
        for result in worker.get_finished():
            assert result.success
            ended.append(result.job_id)
        sleep(0.005)
    return ended


def test_stored_blocks_are_loaded_into_others(worker: HostWorker) -> None:
    before = [page.cpu() for page in worker.pages]
    stored, loaded = [3, 4, 5, 9, 2], [10, 11, 15, 16, 17]
    worker.submit_store(1, places(*stored, first=1), places(7, 4, 5))
    worker.wait({1})
    assert finish(worker, 1) == [1]
    worker.submit_load(2, places(7, 4, 5), places(*loaded, first=1))
    assert finish(worker, 1) == [2]
    for page, old in zip(worker.pages, before, strict=True):
        assert torch.equal(page[loaded].cpu(), old[stored])
        left = [block for block in range(20) if block not in loaded]
        assert torch.equal(page[left].cpu(), old[left])


def test_consecutive_blocks_are_copied_at_once(worker: HostWorker) -> None:
    runs = worker._runs(places(3, 4, 5, 6, 9, 10), places(7, 8, 2))
    assert runs == [(0, (3, 14, 4)), (0, (9, 4, 2))]


def test_loads_do_not_wait_for_stores(worker: HostWorker) -> None:
    released = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: released.wait(60) and None)
    stream = ctypes.c_void_p(worker._stores.stream.npu_stream)
    assert ctypes.CDLL("libascendcl.so").aclrtLaunchHostFunc(stream, wait, None) == 0
    worker.submit_store(1, places(3, 4), places(1))
    worker.submit_load(2, places(2), places(5, 6))
    assert finish(worker, 1) == [2]
    released.set()
    assert finish(worker, 1) == [1]


ENGINE = f"test-{uuid.uuid4()}"


def tiered(size: int, ranks: int = 1, rank: int = 0, form: str = "", **more: Any) -> TieredSpec:
    """Spec of a rank of tensor parallelism that has blocks of ``size`` bytes, which vLLM considers
    as independent of the number of ranks unless ``more`` has ``replicated_layout``."""
    parallel = {
        "rank": rank,
        "world_size": ranks,
        "tp_size": ranks,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": "replicated_layout" not in more,
    }
    known = {field.name for field in dataclasses.fields(OffloadingParallelConfig)}
    return TieredSpec(
        OffloadingConfig(
            (OffloadingGroupConfig(16, ("layer",), 0),),
            size,
            False,
            {"cpu_bytes_to_use": 1 << 20, "kv_format": form},
            ENGINE,
            OffloadingModelConfig("model", "float16"),
            OffloadingCacheConfig(16, PER_CHUNK),
            OffloadingParallelConfig(**{name: parallel[name] for name in known}),
            **more,
        )
    )


def context_parallel(size: int, interleave: int) -> VllmConfig:
    """Configuration in which ranks take turns of ``interleave`` tokens."""
    config = VllmConfig()
    config.parallel_config.decode_context_parallel_size = size
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    return config


def test_file_tiers_share_caches_of_one_format_only() -> None:
    def path(*args: Any, **more: Any) -> str:
        spec = tiered(*args, **more)
        return FileMapper.from_offloading_spec("", spec, parallel_agnostic=True).base_path

    assert path(4096) == path(4096)
    latents = path(4096, 2, replicated_layout=True)
    assert path(4096, 4, replicated_layout=True) == latents
    # The second has int8 latents, the third half of the heads.
    assert len({path(4096), path(2048), path(2048, 2), latents}) == 4
    forms = [kv_format(context_parallel(*each)) for each in ((1, 1), (1, 4), (2, 1), (2, 4))]
    assert forms[0] == forms[1] == ""
    assert len({path(4096, 2, form=form) for form in forms}) == 3


@pytest.mark.parametrize("shared", [False, True])
def test_latents_of_ranks_share_host_memory(shared: bool) -> None:
    size = 4096  # A multiple of the alignment: rows have no padding.
    page = CanonicalKVCacheTensor(torch.zeros(8, size, dtype=torch.int8).npu(), size)
    caches = CanonicalKVCaches([page], [[CanonicalKVCacheRef(0, size)]])
    specs = [tiered(size, 2, rank, replicated_layout=shared) for rank in range(2)]
    try:
        first, second = (spec.get_worker(caches) for spec in specs)
        first.host[0].fill_(1)
        assert bool((second.host[0] == int(shared)).all())
        for worker in (second, first):
            worker.shutdown()
    finally:
        Path(f"/dev/shm/vllm_offload_{ENGINE}.mmap").unlink(missing_ok=True)


PRIVATE = {
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": ["_registry"],
    "vllm.v1.kv_offload.tiering.factory:SecondaryTierFactory": ["_registry"],
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker:OffloadingConnectorWorker": [
        "_init_worker",
        "_load_jobs",
    ],
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler": [
        "_req_status",
        "_jobs",
    ],
    "vllm.v1.kv_offload.tiering.spec:TieringOffloadingSpec": [
        "_scheduler_mmap",
        "_engine_id",
        "_manager",
    ],
    "vllm.v1.kv_offload.cpu.shared_offload_region:SharedOffloadRegion": ["_base", "_creator"],
    "vllm.v1.kv_offload.tiering.fs.thread_pool:DualQueueThreadPool": ["_threads"],
}
"""Names of vLLM that are not its interface, and that this wheel uses."""


@pytest.mark.parametrize("place", PRIVATE)
def test_vllm_has_the_private_names_that_are_used(place: str) -> None:
    module, _, name = place.partition(":")
    bases = getattr(importlib.import_module(module), name).__mro__
    source = "".join(
        inspect.getsource(base) for base in bases if base.__module__.startswith("vllm.")
    )
    assert [each for each in PRIVATE[place] if not re.search(rf"\b{each}\b", source)] == []
