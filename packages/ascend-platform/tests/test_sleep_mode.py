# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sleep mode: memory freed and restored at the same addresses, with a worker that has only a model
and KV caches."""

import gc
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch_npu
from ascend_platform.errors import RefusedError
from ascend_platform.plugins import slots
from ascend_platform.worker import sleep_mode, virtual_memory
from ascend_platform.worker.sleep_mode import VirtualMemoryBackend
from ascend_platform.worker.worker import NPUWorker
from harness.engines import npus, scripts

NZ, ND = 29, 2
BIG = 12 << 20  # Bytes, with a separate segment of the caching allocator.


class Model(torch.nn.Module):
    """Parameters, one of them tied, a buffer, a tensor in a private format, and one that no module
    has as an attribute."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(1024, BIG // 4096, bias=False, device="npu")
        self.second = torch.nn.Linear(1024, BIG // 4096, bias=False, device="npu")
        self.second.weight = self.first.weight
        self.small = torch.nn.Linear(64, 32, device="npu")
        self.register_buffer("table", torch.arange(100.0, device="npu"))
        self.listed = [torch.arange(7, device="npu")]
        torch.npu.config.allow_internal_format = True
        try:
            private = torch_npu.npu_format_cast(torch.randn(64, 48).half().npu(), NZ)
            self.private = torch.nn.Parameter(private, requires_grad=False)
        finally:
            torch.npu.config.allow_internal_format = False  # torch_npu's default
        torch.ones(BIG, device="npu")  # a temporary tensor of loading


@pytest.fixture
def worker():
    gc.collect()
    worker = SimpleNamespace(get_draft_model=lambda: None)
    worker.backend = VirtualMemoryBackend(worker)
    with worker.backend.pool("weights"):
        worker.model = Model()
    with worker.backend.pool("kv_cache"):
        caches = list(torch.ones(1 << 20, device="npu").split(1 << 19))
    worker.model_runner = SimpleNamespace(get_model=lambda: worker.model, kv_caches=caches)
    yield worker
    worker.backend._memory.close()


def used():
    torch.npu.synchronize()
    free, total = torch.npu.mem_get_info()
    return total - free


def values(model):
    private = torch_npu.npu_format_cast(model.private.data, ND)
    kept = [model.table, model.listed[0]]
    return [
        tensor.cpu().clone() for tensor in (model.first.weight.data, model.small.bias.data, private)
    ], [t.cpu() for t in kept]


def test_temporary_tensors_of_loading_are_freed(worker):
    segments = worker.backend._memory._segments.values()
    mapped = [segment.size for segment in segments if segment.handle is not None]
    assert BIG < max(mapped) < 2 * BIG
    assert mapped.count(max(mapped)) == 1  # There were two copies of the tied weights.


@pytest.mark.parametrize("level", [1, 2])
def test_all_tensors_are_restored_at_their_addresses(worker, level):
    model, backend = worker.model_runner.get_model(), worker.backend
    (before, kept), address = values(model), model.first.weight.data_ptr()
    graph, doubled = torch.npu.NPUGraph(), torch.empty_like(model.first.weight)
    with torch.npu.graph(graph):
        torch.mul(model.first.weight.detach(), 2, out=doubled)
    awake = used()
    backend.suspend(level)
    assert backend.state() == "SUSPENDED"
    assert awake - used() >= BIG + (4 << 20)
    backend.resume()
    assert backend.state() == "RUNNING"
    assert used() <= awake
    assert model.first.weight.data_ptr() == address
    wanted = before if level == 1 else [torch.zeros_like(tensor) for tensor in before]
    torch.testing.assert_close(values(model), (wanted, kept), rtol=0, atol=0)
    assert int(torch_npu.get_npu_format(model.private)) == NZ
    assert not worker.model_runner.kv_caches[1].any()
    model.first.weight.data.fill_(3)
    assert (model.second.weight == 3).all()
    graph.replay()  # it was not captured again
    assert (doubled == 6).all()


def test_tags(worker):
    model, backend = worker.model_runner.get_model(), worker.backend
    before, awake = values(model), used()
    backend.discard(("kv_cache",))
    torch.testing.assert_close(values(model), before)
    assert awake - used() >= 4 << 20
    backend.suspend(1)
    backend.resume(["kv_cache"])
    assert backend.state() == "SUSPENDED"
    assert not worker.model_runner.kv_caches[0].any()
    backend.resume(["weights"])
    assert backend.state() == "RUNNING"
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    with pytest.raises(
        ValueError, match="unknown sleep mode tag 'kv'; supported: weights, kv_cache"
    ):
        backend.resume(["kv"])


def test_wake_up_without_free_memory_can_be_repeated(worker):
    model, backend = worker.model_runner.get_model(), worker.backend
    before = values(model)
    backend.suspend(1)
    free, _ = torch.npu.mem_get_info()
    segment = virtual_memory.Segment(free - (6 << 20), torch.npu.current_device(), "other")
    with pytest.raises(torch.OutOfMemoryError):
        backend.resume(["weights"])
    segment.unmap()
    backend.resume()
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)


def fail(monkeypatch, function, after):
    """Let calls of a function of CANN fail after this many."""
    gc.collect()
    torch.npu.empty_cache()  # segments of other tests
    call, calls = virtual_memory._call, []

    def fails(name, *arguments):
        if name == function:
            calls.append(name)
            if len(calls) > after:
                raise RuntimeError(f"{name} failed with error 507899")
        call(name, *arguments)

    monkeypatch.setattr(virtual_memory, "_call", fails)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_that_cannot_keep_contents_changes_nothing(worker, monkeypatch, level):
    before, in_use = values(worker.model), used()
    with monkeypatch.context() as patched:
        fail(patched, "aclrtMemcpy", after=1)
        with pytest.raises(RuntimeError, match="aclrtMemcpy failed"):
            worker.backend.suspend(level)
    assert used() <= in_use
    assert worker.backend.state() == "RUNNING"
    torch.testing.assert_close(values(worker.model), before, rtol=0, atol=0)
    assert worker.model_runner.kv_caches[0].all()
    assert not any(segment.kept for segment in worker.backend._memory._segments.values())
    worker.backend.suspend(1)
    worker.backend.resume()
    torch.testing.assert_close(values(worker.model), before, rtol=0, atol=0)


def test_sleep_that_cannot_free_restores(worker, monkeypatch):
    before, in_use = values(worker.model), used()
    with monkeypatch.context() as patched:
        fail(patched, "aclrtUnmapMem", after=1)
        with pytest.raises(RuntimeError, match="aclrtUnmapMem failed"):
            worker.backend.suspend(1)
    assert used() <= in_use
    assert worker.backend.state() == "RUNNING"
    torch.testing.assert_close(values(worker.model), before, rtol=0, atol=0)


@pytest.mark.parametrize("function", ["aclrtMapMem", "aclrtMemset", "aclrtMemcpy"])
def test_wake_up_that_fails_can_be_repeated(worker, monkeypatch, function):
    before = values(worker.model)
    worker.backend.suspend(1)
    asleep = used()
    with monkeypatch.context() as patched:
        fail(patched, function, after=0)
        with pytest.raises(RuntimeError, match=f"{function} failed"):
            worker.backend.resume()
    assert used() == asleep
    worker.backend.resume()
    torch.testing.assert_close(values(worker.model), before, rtol=0, atol=0)


def test_all_ranks_sleep_and_wake_or_none():
    """Two stages of two ranks. Only the last raises, so that vLLM's executor has read all
    responses."""
    program = str(Path(__file__).with_name("sleeping_ranks.py"))
    done = npus.run(4, sys.executable, program, VLLM_PLUGINS="", timeout=300)
    for rank, (refused, slept, failed) in enumerate(npus.by_name(done)["sleep"]["ranks"]):
        assert refused == {
            "raised": "the KV cache is still being read" if rank == 3 else "",
            "state": "RUNNING",
            "told": [False, True],
            "weights": 1 << 20,
        }
        assert slept == refused | {"raised": "", "state": "SUSPENDED"}
        raised = "no free memory" if rank == 3 else ""
        assert failed == slept | {"raised": raised, "told": []}


def test_freed_tensors_free_their_segments(worker):
    memory, before = worker.backend._memory, used()
    worker.model_runner.kv_caches.clear()
    worker.model = None
    memory.close()
    gc.collect()
    torch.npu.empty_cache()
    assert not memory._segments
    assert before - used() >= BIG


def test_sleep_without_the_option_is_refused():
    with pytest.raises(ValueError, match="sleep mode is not enabled; fix: --enable-sleep-mode"):
        VirtualMemoryBackend(SimpleNamespace()).suspend()


def test_process_ends_with_tensors_in_use():
    """Segments are freed by Python functions, which must not be called after the interpreter has
    ended."""
    program = """
import torch
from ascend_platform.worker.virtual_memory import VirtualMemory
memory = VirtualMemory()
with memory.pool("weights"):
    kept = torch.ones(1 << 22, device="npu"); torch.ones(1 << 23, device="npu")
memory.keep("weights", ())
memory.free("weights")
"""
    done = scripts.run(program)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("when", ["load", "exit"])
def test_metrics_do_not_wait_for_the_caching_allocator(when):
    """The caching allocator calls Python with its lock held, and a thread that asks it for
    statistics holds the interpreter's lock."""
    program = """
import atexit, sys, threading
stopped = threading.Event()
atexit.register(stopped.set)  # after the segments have been freed
import torch
from ascend_platform.observability import metrics
from ascend_platform.worker.virtual_memory import VirtualMemory
metrics.INTERVAL = 0.0
measure = threading.Thread(
    target=metrics._report_until_stopped, args=(lambda values: None, 0, stopped), daemon=True
)
memory, kept = VirtualMemory(), []
if sys.argv[1] == "load":
    measure.start()
for _ in range(40):
    with memory.pool("weights"):
        kept.append(torch.ones(3 << 20, device="npu"))
if sys.argv[1] == "exit":
    kept.clear()
    measure.start()
    stopped.wait(1)
"""
    done = scripts.run(program, when)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_memory_that_another_process_takes_does_not_undo_sleep(worker, monkeypatch, log_lines):
    """Such as a trainer on the same NPU; here this process, as soon as the memory is free."""
    segments, free = [], worker.backend._memory.free

    def free_and_take(tag):
        free(tag)
        segments.append(torch.empty(8 * BIG, dtype=torch.uint8, device="npu"))

    monkeypatch.setattr(worker.backend._memory, "free", free_and_take)
    whole = NPUWorker.__new__(NPUWorker)
    whole.__dict__.update(
        sleep_mode_backend=worker.backend,
        model_runner=worker.model_runner,
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        _sleep_saved_buffers={},
        _sleep_saved_parameters={},
        _sleep_saved_draft_buffers={},
    )
    before = values(worker.model)
    whole.sleep(level=1)
    ((level, line),) = log_lines
    assert (level, "has less free memory than before" in line) == ("WARNING", True)
    assert worker.backend.state() == "SUSPENDED"
    segments.clear()
    torch.npu.empty_cache()
    whole.wake_up()
    torch.testing.assert_close(values(worker.model), before, rtol=0, atol=0)


def test_all_components_are_told(monkeypatch):
    calls = []
    monkeypatch.setattr(slots, "_offers", {})
    monkeypatch.setattr(
        sleep_mode,
        "resolve_obj_by_qualname",
        lambda name: lambda state: calls.append((name, state)),
    )
    slots.offer("worker.awake", "weights.awake")
    slots.offer("worker.awake.kv_connector", "kv.awake")
    sleep_mode.notify_awake(False)
    assert calls == [("weights.awake", False), ("kv.awake", False)]


def test_components_are_awake_after_another_has_refused(worker, monkeypatch):
    calls = []

    def awake(name, state):
        calls.append((name, state))
        if name == "kv.awake" and not state:
            raise RefusedError("the KV cache is still being read")

    monkeypatch.setattr(slots, "_offers", {})
    monkeypatch.setattr(
        sleep_mode, "resolve_obj_by_qualname", lambda name: lambda state: awake(name, state)
    )
    slots.offer("worker.awake", "weights.awake")
    slots.offer("worker.awake.kv_connector", "kv.awake")
    before, in_use = values(worker.model), used()
    with pytest.raises(RefusedError, match="is still being read"):
        worker.backend.suspend(1)
    assert calls[:2] == [("weights.awake", False), ("kv.awake", False)]
    assert calls[2:] == [("weights.awake", True), ("kv.awake", True)]
    torch.testing.assert_close(values(worker.model), before, rtol=0, atol=0)
    assert used() <= in_use
    assert worker.backend.state() == "RUNNING"
