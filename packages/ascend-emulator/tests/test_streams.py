# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Streams as queues with threads of their own: order, events, time, errors, and an adversary that
makes a missing wait fail."""

import ctypes
import sys
import threading
import time

import pytest
import torch


@pytest.fixture
def side_stream():
    return torch.npu.Stream()


def slow(stream, tensor, times=60):
    """Some hundred milliseconds of work on the stream."""
    with torch.npu.stream(stream):
        for _ in range(times):
            tensor = tensor @ tensor * 1e-3
    return tensor


@pytest.fixture(scope="module")
def matrix():
    return torch.full((512, 512), 1e-3, device="npu")


def test_work_is_not_done_when_the_call_returns(side_stream, matrix):
    event = torch.npu.Event()
    slow(side_stream, matrix)
    event.record(side_stream)
    assert not event.query()
    assert not side_stream.query()
    event.synchronize()
    assert event.query()
    side_stream.synchronize()
    assert side_stream.query()


def test_event_of_an_idle_stream_is_complete_at_once():
    stream = torch.npu.SyncLaunchStream()  # without torch_npu's own queue
    for _ in range(200):
        event = torch.npu.Event()
        event.record(stream)
        assert event.query()


def test_small_operator_of_an_idle_stream_runs_within_the_call():
    stream = torch.npu.SyncLaunchStream()
    with torch.npu.stream(stream), torch.inference_mode():
        total = torch.zeros(8, device="npu")
        stream.synchronize()
        for _ in range(200):
            total += 1
            assert stream.query()
        total = total.clone()
    assert total.tolist() == [200] * 8
    assert total.is_inference()


def test_threads_record_events_on_a_stream_that_computes():
    stream = torch.npu.SyncLaunchStream()
    events = [torch.npu.Event() for _ in range(600)]

    def record(some):
        torch.npu.set_device(0)
        for event in some:
            event.record(stream)

    threads = [threading.Thread(target=record, args=(events[first::3],)) for first in range(3)]
    with torch.npu.stream(stream):
        total = torch.zeros(8, device="npu")
        for thread in threads:
            thread.start()
        for _ in range(300):
            total += 1
    for thread in threads:
        thread.join()
    stream.synchronize()
    assert total.tolist() == [300] * 8
    assert all(event.query() for event in events)


def test_an_event_that_was_never_recorded_is_complete(side_stream):
    event = torch.npu.Event()
    assert event.query()
    event.wait(side_stream)
    event.synchronize()


def test_a_stream_waits_for_an_event_of_another(side_stream, matrix):
    result = slow(side_stream, matrix)
    torch.npu.current_stream().wait_stream(side_stream)
    total = result.sum()
    expected = matrix.cpu().double()
    for _ in range(60):
        expected = expected @ expected * 1e-3
    assert total.item() == pytest.approx(expected.sum().item(), rel=1e-4)


def test_elapsed_time_is_device_time(side_stream, matrix):
    first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start = time.monotonic()
    first.record(side_stream)
    slow(side_stream, matrix)
    last.record(side_stream)
    last.synchronize()
    wall = (time.monotonic() - start) * 1000
    assert 0 < first.elapsed_time(last) <= wall * 1.5 + 5


def test_events_without_timing_have_no_time(side_stream):
    first, last = torch.npu.Event(), torch.npu.Event()
    for event in (first, last):
        event.record(side_stream)
        event.synchronize()
    with pytest.raises(RuntimeError):
        first.elapsed_time(last)


def test_streams_go_on_beside_each_other():
    """One waits for a value that only the other writes: neither would end if they took turns."""
    value = torch.zeros(8, dtype=torch.int64, device="npu")
    torch.npu.synchronize()
    library, streams = ctypes.CDLL("libascendcl.so"), [torch.npu.Stream(), torch.npu.Stream()]
    address, handles = (
        ctypes.c_void_p(value.data_ptr()),
        [ctypes.c_void_p(stream.npu_stream) for stream in streams],
    )
    assert library.aclrtValueWait(address, ctypes.c_uint64(7), 1, handles[0]) == 0
    time.sleep(0.02)
    assert not streams[0].query()
    assert library.aclrtValueWrite(address, ctypes.c_uint64(7), 0, handles[1]) == 0
    streams[0].synchronize()
    assert value[0].item() == 7


def test_synchronizing_with_a_timeout_says_what_runs():
    value = torch.zeros(8, dtype=torch.int64, device="npu")
    torch.npu.synchronize()
    library, stream = ctypes.CDLL("libascendcl.so"), torch.npu.Stream()
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    address, handle = ctypes.c_void_p(value.data_ptr()), ctypes.c_void_p(stream.npu_stream)
    assert library.aclrtValueWait(address, ctypes.c_uint64(1), 1, handle) == 0
    assert library.aclrtSynchronizeStreamWithTimeout(handle, 30) == 507046
    assert b"the deadline passed while stream" in library.aclGetRecentErrMsg()
    assert (
        library.aclrtValueWrite(
            address, ctypes.c_uint64(1), 0, ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        )
        == 0
    )
    stream.synchronize()


def test_pageable_memory_may_change_after_the_copy_returns(side_stream, matrix):
    source, target = torch.ones(1 << 16), torch.zeros(1 << 16, device="npu")
    torch.npu.synchronize()
    slow(side_stream, matrix)
    with torch.npu.stream(side_stream):
        target.copy_(source, non_blocking=True)
    source.fill_(2)
    side_stream.synchronize()
    assert target.sum().item() == 1 << 16


def test_pinned_memory_is_read_when_the_copy_runs(side_stream, matrix):
    source, target = torch.ones(1 << 16).pin_memory(), torch.zeros(1 << 16, device="npu")
    torch.npu.synchronize()
    slow(side_stream, matrix)
    with torch.npu.stream(side_stream):
        target.copy_(source, non_blocking=True)
    source.fill_(2)
    side_stream.synchronize()
    assert target.sum().item() == 2 << 16


def test_destroyed_and_foreign_handles_are_refused():
    library = ctypes.CDLL("libascendcl.so")
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    handle = ctypes.c_void_p()
    assert library.aclrtCreateStream(ctypes.byref(handle)) == 0
    assert library.aclrtDestroyStream(handle) == 0
    assert library.aclrtSynchronizeStream(handle) != 0
    assert b"is no stream, or it was destroyed" in library.aclGetRecentErrMsg()
    assert library.aclrtSynchronizeEvent(ctypes.c_void_p(64)) != 0
    assert b"is no event, or it was destroyed" in library.aclGetRecentErrMsg()


def test_host_functions_run_in_stream_order():
    library, stream = ctypes.CDLL("libascendcl.so"), torch.npu.Stream()
    seen, kind = [], ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    calls = [
        kind(lambda _, number=number: seen.append((number, threading.get_ident())))
        for number in range(3)
    ]
    for call in calls:
        assert library.aclrtLaunchHostFunc(ctypes.c_void_p(stream.npu_stream), call, None) == 0
    stream.synchronize()
    assert [number for number, _ in seen] == [0, 1, 2]
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_streams_run_out_as_on_the_chip(run):
    """310P has 1024."""
    script = """
import torch, torch_npu, ctypes
torch.npu.set_device(0)
library, handle, made = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p(), 0
library.aclGetRecentErrMsg.restype = ctypes.c_char_p
while (status := library.aclrtCreateStream(ctypes.byref(handle))) == 0:
    made += 1
print(made, status, library.aclGetRecentErrMsg().decode())
"""
    done = run("run", "--soc", "Ascend310P3", "--", sys.executable, "-c", script)
    num_streams, status, message = done.stdout.split(" ", 2)
    assert 900 < int(num_streams) <= 1024
    assert status == "207008"
    assert "no stream resource: NPU 0 has 1024 streams" in message


@pytest.mark.parametrize(
    ("driver", "version", "captured", "message"),
    [
        ("", "", range(900, 1024), "error code is 207008"),
        (
            "24.1.rc3",
            "24.1.rc3",
            range(900, 1024),
            "[SqCqManage]Alloc sq cq fail, retCode=0x7020023",
        ),
        ("25.5.1", "25.5.1", range(1100, 1101), ""),
    ],
)
def test_streams_of_graphs_by_driver_version(run, driver, version, captured, message):
    """310P has 1024 streams, which graphs keep with drivers before 25.5.1."""
    script = """
import torch, torch_npu
from torch_npu.npu.utils import get_cann_version
torch_npu.npu.set_compile_mode(jit_compile=False)
x, graphs, failure = torch.ones(1).npu(), [], ""
with torch.npu.stream(torch.npu.Stream()):
    while len(graphs) < 1100 and not failure:
        graph = torch.npu.NPUGraph()
        try:
            graph.capture_begin()
            x.add_(1)
            graph.capture_end()
            graphs.append(graph)
        except RuntimeError as error:
            failure = str(error)
print(len(graphs), get_cann_version("DRIVER") or "unknown", failure)
"""
    given = ["--driver", driver] if driver else []
    done = run("run", "--soc", "Ascend310P3", *given, "--", sys.executable, "-c", script)
    count, result, failure = done.stdout.split(" ", 2)
    assert int(count) in captured
    assert result == (version or "unknown")
    assert message in failure
    assert bool(failure.strip()) == bool(message)
    assert ("207005" in failure) == (driver == "24.1.rc3")


def test_driver_versions_are_checked(run):
    done = run("run", "--driver", "new", "--", "true")
    assert (done.returncode, done.stderr) == (
        2,
        "ascend-emulator run: driver version 'new'; use a form such as 25.5.1 or 24.1.rc3\n",
    )


MISSING_WAIT = """
import sys, time, torch, torch_npu
x, y = torch.zeros(1 << 12).npu(), torch.zeros(1 << 12).npu()
side, main = torch.npu.Stream(), torch.npu.current_stream()
torch.npu.synchronize()
wrong = []
for step in range(1, 13):
    with torch.npu.stream(side):
        x.fill_(step)
    if sys.argv[1] == "waits":
        main.wait_stream(side)
    time.sleep(0.02)
    y.copy_(x)
    side.wait_stream(main)
    if y[0].item() != step:
        wrong.append(step)
print(wrong)
"""


@pytest.fixture(scope="module")
def steps(run):
    def wrong(program, *options):
        done = run("run", *options, "--", sys.executable, "-c", MISSING_WAIT, program)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return wrong


def test_a_missing_wait_passes_ordinarily(steps):
    assert steps("misses") == "[]\n"


def test_missing_wait_fails_reproducibly_with_an_adversary(steps):
    first = steps("misses", "--adversary", "1")
    assert first != "[]\n"
    assert steps("misses", "--adversary", "1") == first
    assert steps("misses", "--adversary", "2") != first


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_an_adversary_finds_nothing_where_events_order_all(steps, seed):
    assert steps("waits", "--adversary", seed) == "[]\n"


FAILING = """
import torch, torch_npu
x = torch.ones(4, device="npu")
side = torch.npu.Stream()
torch.npu.synchronize()
with torch.npu.stream(side):
    x[torch.tensor([9]).npu()]
torch.npu.current_stream().wait_stream(side)
main = torch.npu.current_stream()
for label, call in {"other": main.synchronize, "event": main.record_event().synchronize}.items():
    try:
        call()
        print(label, "passed")
    except RuntimeError as error:
        print(label, "index 9 is out of bounds" in str(error))
"""


def test_error_reaches_all_waiters_of_its_stream(run):
    done = run("run", "--", sys.executable, "-c", FAILING)
    assert done.stdout.splitlines() == ["other True", "event True"], done.stderr


def test_operator_refused_in_one_queue_does_not_stop_other_npus(run):
    """With TASK_QUEUE_ENABLE=2, torch_npu calls both functions of an operator on its queue's
    thread.

    After the error is known, that thread forgets the events recorded on all NPUs
    (NPUEventManager::ClearUnrecordedCount), and one recorded on another NPU just then ends the
    process: the script waits before it goes on.
    """
    script = """
import time
import torch, torch_npu
x, y = torch.ones(4, device="npu:0"), torch.ones(4, device="npu:1")
torch.npu.synchronize(0)
torch.npu.synchronize(1)
torch.npu.set_device(0)
torch.mul(x, 2)
try:
    torch.npu.synchronize(0)
except RuntimeError as error:
    print("aclnnMuls" in str(error))
time.sleep(1)
torch.npu.set_device(1)
z = y + 1
torch.npu.synchronize(1)
event = torch.npu.Event()
event.record()
event.synchronize()
print(z.tolist())
"""
    done = run(
        "run",
        "--npus",
        "2",
        "--without",
        "aclnnMuls",
        "--",
        sys.executable,
        "-c",
        script,
        TASK_QUEUE_ENABLE="2",
    )
    assert done.stdout == "True\n[2.0, 2.0, 2.0, 2.0]\n", done.stderr
