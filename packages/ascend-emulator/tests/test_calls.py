# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""CANN's calls that torch has no function for, through its C interface."""

import ctypes
import os
import sys
import textwrap
import threading
from ctypes import byref, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p

import pytest
import torch
from ascend_emulator import coverage, faults


@pytest.fixture(scope="module")
def acl():
    torch.npu.current_device()
    return ctypes.CDLL("libascendcl.so")


@pytest.fixture
def stream():
    held = torch.npu.Stream()
    yield c_void_p(held.npu_stream)
    held.synchronize()


def at(tensor):
    return c_void_p(tensor.data_ptr())


def test_memory_is_set_and_copied_in_stream_order(acl, stream):
    x, host = torch.zeros(64, dtype=torch.uint8, device="npu"), c_void_p()
    torch.npu.synchronize()
    assert acl.aclrtMallocHostWithCfg(byref(host), c_uint64(64), None) == 0
    assert acl.aclrtMemsetAsync(at(x), c_size_t(64), 7, c_size_t(64), stream) == 0
    assert (
        acl.aclrtMemcpyAsyncWithCondition(host, c_size_t(64), at(x), c_size_t(64), 2, stream) == 0
    )
    assert acl.aclrtSynchronizeDevice() == 0
    assert ctypes.string_at(host, 64) == b"\7" * 64
    assert acl.aclrtFreeHost(host) == 0


def test_an_event_has_a_time_until_it_is_reset(acl, stream):
    event, status, times = c_void_p(), c_int32(9), [c_uint64(), c_uint64()]
    assert acl.aclrtCreateEventWithFlag(byref(event), 8) == 0
    for time in times:
        assert acl.aclrtRecordEvent(event, stream) == 0
        assert acl.aclrtSynchronizeEvent(event) == 0
        assert acl.aclrtEventGetTimestamp(event, byref(time)) == 0
    assert 0 < times[0].value <= times[1].value
    assert acl.aclrtQueryEventWaitStatus(event, byref(status)) == 0
    assert status.value == 0
    assert acl.aclrtResetEvent(event, stream) == 0
    assert acl.aclrtEventGetTimestamp(event, byref(times[0])) != 0
    assert acl.aclrtDestroyEvent(event) == 0


def test_callbacks_run_on_the_thread_that_processes_reports(acl, stream):
    ready, ran = threading.Event(), []
    callback = ctypes.CFUNCTYPE(None, c_void_p)(
        lambda data: ran.append((data, threading.get_ident()))
    )

    def process():
        ready.wait()
        for _ in range(2):
            assert acl.aclrtProcessReport(5000) == 0

    thread = threading.Thread(target=process)
    thread.start()
    thread_id = c_uint64(thread.ident)
    assert acl.aclrtSubscribeReport(thread_id, stream) == 0
    for number in (1, 2):
        assert acl.aclrtLaunchCallback(callback, c_void_p(number), 1, stream) == 0
    ready.set()
    assert acl.aclrtSynchronizeStream(stream) == 0
    thread.join()
    assert ran == [(1, thread.ident), (2, thread.ident)]
    assert acl.aclrtUnSubscribeReport(thread_id, stream) == 0
    assert acl.aclrtLaunchCallback(callback, None, 1, stream) == 107015


def test_a_graph_is_listed_on_standard_output(acl, capfd):
    x, model, capture_stream = torch.ones(3, device="npu"), c_void_p(), torch.npu.Stream()
    stream = c_void_p(capture_stream.npu_stream)
    torch.npu.synchronize()
    with torch.npu.stream(capture_stream):
        assert acl.aclmdlRICaptureBegin(stream, 2) == 0
        torch.abs(x, out=x)
        # This empties torch_npu's queue, which the next call bypasses.
        _ = torch.npu.current_stream().npu_stream
        assert acl.aclmdlRICaptureEnd(stream, byref(model)) == 0
    assert acl.aclmdlRIDebugPrint(model) == 0
    ctypes.CDLL(None).fflush(None)
    assert "node 0: aclnnAbs" in capfd.readouterr().out
    assert acl.aclmdlRIDestroy(model) == 0


def test_aborting_tasks_of_a_device_ends_a_wait(run):
    """torch_npu then raises FORCE STOP by itself (its stop_device)."""
    script = """
        import ctypes, torch
        acl, x, side = ctypes.CDLL("libascendcl.so"), torch.zeros(1, dtype=torch.int64, device="npu"), torch.npu.Stream()
        torch.npu.synchronize()
        stream = ctypes.c_void_p(side.npu_stream)
        assert acl.aclrtValueWait(ctypes.c_void_p(x.data_ptr()), ctypes.c_uint64(5), 1, stream) == 0
        assert acl.aclrtSynchronizeStreamWithTimeout(stream, 50) != 0
        assert acl.aclrtDeviceTaskAbort(0, 0) == 0
        print(acl.aclrtSynchronizeStreamWithTimeout(stream, 5000))
    """
    done = run("run", "--", sys.executable, "-c", textwrap.dedent(script))
    assert done.stdout.strip() == "0", done.stderr


def test_aborting_a_device_waits_for_the_running_operator(run):
    """The caller may free the operator's memory then. Two seconds of computing: the wait was
    limited to one."""
    script = """
        import ctypes, time, torch
        acl, x, side = ctypes.CDLL("libascendcl.so"), torch.ones(6144, 6144, device="npu"), torch.npu.Stream()
        torch.npu.synchronize()
        with torch.npu.stream(side):
            y = x @ x
        side.npu_stream  # empties torch_npu's queue
        started = time.process_time()
        while time.process_time() - started < 0.2:  # until it runs
            time.sleep(0.01)
        assert acl.aclrtDeviceTaskAbort(0, 0) == 0
        ended = time.process_time()
        time.sleep(0.5)
        print(ended - started > 1.2, time.process_time() - ended < 0.05)
    """
    done = run("run", "--", sys.executable, "-c", textwrap.dedent(script), OMP_NUM_THREADS="1")
    assert done.stdout.strip() == "True True", (done.stdout, done.stderr)


def test_memory_is_shared_only_with_listed_processes(acl):
    memory, key = c_void_p(), ctypes.create_string_buffer(65)
    assert acl.aclrtMallocAlign32(byref(memory), c_size_t(1 << 21), 0) == 0
    assert (
        acl.aclrtIpcMemGetExportKey(memory, c_size_t(1 << 21), key, c_size_t(65), c_uint64(0)) == 0
    )
    assert acl.aclrtIpcMemSetImportPid(key, (c_int32 * 1)(os.getpid()), c_size_t(1)) == 0
    assert acl.aclrtIpcMemSetImportPid(b"no key", (c_int32 * 1)(os.getpid()), c_size_t(1)) != 0
    assert acl.aclrtFree(memory) == 0


def test_faulty_memory_is_repaired(acl):
    held, ranges, count = (
        torch.ones(1 << 20, device="npu"),
        ctypes.create_string_buffer(256),
        c_size_t(),
    )
    torch.npu.synchronize()
    faults.inject("aclrtSynchronizeDevice", kind="uce")
    assert acl.aclrtSynchronizeDevice() != 0
    result = []
    for _ in range(2):
        assert acl.aclrtGetMemUceInfo(0, ranges, c_size_t(1), byref(count)) == 0
        result.append(count.value)
        assert acl.aclrtMemUceRepair(0, ranges, c_size_t(1)) == 0
    faults.clear()
    assert result == [1, 0]
    assert held.sum().item() == 1 << 20


def test_arguments_are_made_and_destroyed(acl):
    for name in ("aclCreateFloatArray", "aclCreateDataBuffer", "aclopCreateAttr"):
        getattr(acl, name).restype = c_void_p
    floats = acl.aclCreateFloatArray((c_float * 2)(1, 2), c_uint64(2))
    buffer = acl.aclCreateDataBuffer(None, c_size_t(0))
    attributes = acl.aclopCreateAttr()
    assert all((floats, buffer, attributes))
    assert acl.aclDestroyFloatArray(c_void_p(floats)) == 0
    assert acl.aclDestroyDataBuffer(c_void_p(buffer)) == 0
    acl.aclopDestroyAttr.restype = None
    acl.aclopDestroyAttr(c_void_p(attributes))


def test_what_does_nothing_says_so_and_succeeds(acl, stream):
    """Those of a communicator are called in hccl_c_scenarios.py."""
    names = {
        point.name
        for point in coverage.entry_points()
        if point.effect == "nothing" and not point.name.startswith("Hccl")
    }
    x = torch.ones(64, dtype=torch.uint8, device="npu")
    arguments = {
        "aclrtSetStreamFailureMode": (stream, c_uint64(1)),
        "aclrtSetStreamAttribute": (stream, 1, byref(c_int64(1))),
        "aclrtSetStreamOverflowSwitch": (stream, 0),
        "aclrtSetDeviceSatMode": (1,),
        "aclrtCmoAsync": (at(x), c_size_t(64), 0, stream),
    }
    for name in sorted(names - {"aclFinalize", "aclAppLog"}):
        assert getattr(acl, name)(*arguments.get(name, (0, 0))) == 0, name


def test_an_executor_is_launched_once(calls):
    library, stream = calls.library, c_void_p(torch.npu.current_stream().npu_stream)
    x, out = torch.ones(3, device="npu"), torch.zeros(3, device="npu")

    def prepared():
        status, executor, _ = calls.workspace("Neg", x, out)
        assert status == 0
        return executor

    def launch(executor):
        return library.aclnnNeg(None, c_uint64(), executor, stream)

    executor = prepared()
    assert launch(executor) == 0
    assert out.tolist() == [-1.0] * 3
    assert launch(executor) == 161002
    assert (
        b"aclnnNeg: the executor was launched or destroyed before" in library.aclGetRecentErrMsg()
    )
    assert library.aclDestroyAclOpExecutor(executor) == 100000
    executor = prepared()
    assert library.aclDestroyAclOpExecutor(executor) == 0
    assert launch(executor) == 161002
