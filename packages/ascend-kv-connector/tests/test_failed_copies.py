# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Copies between NPU and host memory that fail, or do not end."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from ascend_kv_connector import host_worker
from ascend_kv_connector.host_worker import Direction, HostWorker
from ascend_kv_connector.offloading import OffloadingConnector, WorkerMetadata
from ascend_kv_connector.testing import BLOCK, Engine, one_rank, prompts  # noqa: F401
from ascend_platform import extension
from harness.kv.store_engines import Suite
from packaging.version import Version
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

BLOCKS, SIZE = 20, 64


def places(*ids: int) -> Any:
    return SimpleNamespace(block_ids=np.array(ids), group_sizes=[len(ids)], block_indices=[0])


@pytest.fixture
def worker() -> Iterator[HostWorker]:
    page = torch.zeros(BLOCKS, SIZE, dtype=torch.int8, device="npu")
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(page, SIZE)], [[CanonicalKVCacheRef(0, SIZE)]]
    )
    host = torch.ones(BLOCKS, 1, SIZE, dtype=torch.int8, pin_memory=True)
    copier = HostWorker(caches, [host])
    yield copier
    copier.shutdown()


@contextmanager
def busy(direction: Direction) -> Iterator[None]:
    """The direction's stream executes nothing."""
    released = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: released.wait(60) and None)
    stream = ctypes.c_void_p(direction.stream.npu_stream)
    assert ctypes.CDLL("libascendcl.so").aclrtLaunchHostFunc(stream, wait, None) == 0
    try:
        yield
    finally:
        released.set()
        direction.stream.synchronize()


def ended(worker: HostWorker, seconds: float) -> list[int]:
    """Jobs that end in this time, until there are some."""
    until = monotonic() + seconds
    while not (jobs := [each.job_id for each in worker.get_finished()]) and monotonic() < until:
        sleep(0.005)
    return jobs


def test_failed_load_ends_once_nothing_is_copied_any_more(
    worker: HostWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of its copies is still to be made when the second one fails."""
    with busy(worker._loads), failing(stores=False, block=9):
        worker.submit_load(1, places(7, 4), places(3, 9))
        assert ended(worker, 0.3) == []
    worker.wait({1})
    assert ended(worker, 10) == [1]
    assert bool(worker.pages[0][3].all())
    assert (worker.pop_failed(), worker.pop_failed()) == ({1}, set())
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert line.startswith(
        "OffloadingConnector: KV cache was not loaded from host memory: aclrtMemcpyAsync failed; "
    )
    assert "; fix: set this policy" in line
    worker.submit_load(2, places(7), places(5))
    assert (ended(worker, 10), worker.pop_failed()) == ([2], set())


def test_waits_for_copies_end_in_time(worker: HostWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    late = "1 copies of KV cache between NPU and host have not ended; .*; fix: check the NPU"
    for name in ("COPY", "SHUTDOWN", "PAUSE"):
        monkeypatch.setattr(host_worker, f"{name}_SECONDS", 0.2)
    monkeypatch.setattr(host_worker, "_kept", kept := [])
    host, began = worker.host[0], monotonic()
    with busy(worker._stores):
        worker.submit_store(1, places(3), places(4))
        with pytest.raises(extension.RefusedError, match=late):
            worker.wait({1})
        with pytest.raises(extension.RefusedError, match=late):
            ended(worker, 5.0)
        worker.shutdown()
        assert monotonic() - began < 5.0
        # The copy may still write to it.
        assert any(each is host for each in kept)


def test_failed_stores_of_all_ranks_are_reported() -> None:
    one, other = (
        WorkerMetadata(completed_jobs={number: 1, 5: 1}, failed_stores={number})
        for number in (3, 4)
    )
    both = one.aggregate(other)
    assert (both.completed_jobs, both.failed_stores) == ({3: 1, 4: 1, 5: 2}, {3, 4})


@pytest.fixture
def engine(one_rank: None, tmp_path: Path) -> Iterator[Callable[..., Engine]]:  # noqa: F811
    suite, engines = Suite(tmp_path), list[Engine]()

    def make(policy: str = "fail", **options: int) -> Engine:
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"cpu_bytes_to_use": 50_000_000} | options,
        }
        engines.append(suite.make(transfer))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


LONG = {name: prompt for name, prompt in prompts(12, 3).items() if len(prompt) >= 3 * BLOCK}


def serve(engine: Engine, turn: str, name: str) -> tuple[str, int]:
    """Run a prompt, which is not in the NPU's prefix cache afterwards; why it ended, and the
    number of tokens that were loaded."""
    request = f"{turn}-{name}"
    engine.add(request, LONG[name], 3)
    engine.run()
    while engine.scheduler.connector.has_pending_push_work():
        engine.step()
    assert engine.wrong == []
    if (reason := engine.ended[request][0]) == "length":
        Suite.check(None, engine, {request: LONG[name]}, 3)  # type: ignore[arg-type]
    assert engine.scheduler.reset_prefix_cache()
    return reason, engine.loaded.get(request, 0)


@contextmanager
def failing(stores: bool, block: int | None = None) -> Iterator[None]:
    """Copies in one direction fail, all or those of a block."""
    copy = HostWorker._copy

    def fail(worker: HostWorker, *given: Any) -> int:
        if given[-1] == stores and block in (None, given[1]):
            raise RuntimeError("aclrtMemcpyAsync\nfailed")
        return copy(worker, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostWorker, "_copy", fail)
        yield


def test_prompts_whose_blocks_cannot_be_loaded_are_computed(engine: Callable[..., Engine]) -> None:
    one, (name, *_) = engine("recompute"), LONG
    assert serve(one, "first", name) == ("length", 0)
    with failing(stores=False):
        assert serve(one, "failed", name) == ("length", 0)
    reason, loaded = serve(one, "again", name)
    assert reason == "length"
    assert loaded > 0


def test_other_prompts_are_served_after_one_failed(engine: Callable[..., Engine]) -> None:
    one, (name, other, *_) = engine(), LONG
    assert serve(one, "first", name) == ("length", 0)
    with failing(stores=False):
        assert serve(one, "failed", name) == ("error", 0)
    assert serve(one, "first", other) == ("length", 0)
    reason, loaded = serve(one, "again", name)
    assert reason == "length"
    assert loaded > 0


@pytest.mark.skipif(Version(vllm.__version__) < Version("0.33"), reason="an option of vLLM 0.33")
def test_failed_load_that_a_step_waited_for_ends_the_engine(engine: Callable[..., Engine]) -> None:
    one = engine(sync_load_budget_bytes=1 << 30)
    name = next(name for name, prompt in LONG.items() if len(prompt) % BLOCK)
    assert serve(one, "first", name) == ("length", 0)
    with (
        failing(stores=False),
        pytest.raises(extension.RefusedError, match=r"\(sync_load_budget_bytes\); fix: check"),
    ):
        serve(one, "failed", name)


def test_blocks_that_were_not_stored_are_not_loaded(engine: Callable[..., Engine]) -> None:
    one, (name, *_) = engine(), LONG
    with failing(stores=True):
        assert serve(one, "first", name) == ("length", 0)
    assert serve(one, "not stored", name) == ("length", 0)
    reason, loaded = serve(one, "stored", name)
    assert reason == "length"
    assert loaded > 0
    assert isinstance(one.worker, OffloadingConnector)
    assert not one.scheduler.connector._failed_keys
