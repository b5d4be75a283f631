# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Limits of cores of an NPU, a stream and a thread; prefetches; what happened to a device."""

import ctypes
import sys
import textwrap
import threading
from ctypes import byref, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

import pytest
import torch
from ascend_emulator import faults

HARDWARE = (24, 48)  # of Ascend910B1


@pytest.fixture(scope="module")
def acl():
    torch.npu.current_device()
    return ctypes.CDLL("libascendcl.so")


def limits(call, *arguments):
    """The limits of cube and vector cores."""
    value, result = c_uint32(), []
    for kind in (0, 1):
        assert call(*arguments, kind, byref(value)) == 0
        result.append(value.value)
    return tuple(result)


def test_core_limits_of_stream_npu_and_hardware_apply_in_order(acl):
    stream, other = torch.npu.Stream(), torch.npu.Stream()
    handle, without = c_void_p(stream.npu_stream), c_void_p(other.npu_stream)
    assert (
        limits(acl.aclrtGetDeviceResLimit, 0)
        == limits(acl.aclrtGetStreamResLimit, handle)
        == HARDWARE
    )
    assert acl.aclrtSetDeviceResLimit(0, 0, 12) == 0
    assert acl.aclrtSetStreamResLimit(handle, 0, 6) == acl.aclrtSetStreamResLimit(handle, 1, 8) == 0
    assert (
        limits(acl.aclrtGetDeviceResLimit, 0)
        == limits(acl.aclrtGetStreamResLimit, without)
        == (12, 48)
    )
    assert limits(acl.aclrtGetStreamResLimit, handle) == (6, 8)
    assert limits(acl.aclrtGetResInCurrentThread) == (12, 48)
    assert acl.aclrtUseStreamResInCurrentThread(handle) == 0
    assert limits(acl.aclrtGetResInCurrentThread) == (6, 8)
    seen = []
    thread = threading.Thread(
        target=lambda: seen.extend((acl.aclrtSetDevice(0), limits(acl.aclrtGetResInCurrentThread))),
    )
    thread.start()
    thread.join()
    assert seen == [0, (12, 48)]
    assert acl.aclrtUnuseStreamResInCurrentThread(handle) == 0
    assert limits(acl.aclrtGetResInCurrentThread) == (12, 48)
    assert acl.aclrtResetStreamResLimit(handle) == 0
    assert limits(acl.aclrtGetStreamResLimit, handle) == (12, 48)
    assert acl.aclrtResetDeviceResLimit(0) == 0
    assert limits(acl.aclrtGetDeviceResLimit, 0) == HARDWARE


@pytest.mark.parametrize(("kind", "value"), [(0, 25), (1, 49), (0, 0), (2, 1)])
def test_a_limit_that_the_chip_has_not_is_refused(acl, kind, value):
    assert acl.aclrtSetDeviceResLimit(0, kind, value) != 0
    assert limits(acl.aclrtGetDeviceResLimit, 0) == HARDWARE


def test_limits_of_torch_npu(run):
    """Its own test, test_torch_npu.py::test_set_stream_res_limit, which it skips: "CANN doesn't
    support now"."""
    script = """
        import torch
        torch.npu.set_device(0)
        torch.npu.set_device_limit(torch.npu.current_device(), 12, 24)
        streams = torch.npu.current_stream(), torch.npu.Stream()
        torch.npu.set_stream_limit(streams[0], 13, 25)
        torch.npu.set_stream_limit(streams[1], 14, 26)
        print(torch.npu.get_device_limit(0), *map(torch.npu.get_stream_limit, streams))
        torch.npu.reset_stream_limit(streams[0])
        print(torch.npu.get_stream_limit(streams[0]), torch.ones(3).npu().sum().item())
    """
    done = run("run", "--", sys.executable, "-c", textwrap.dedent(script))
    form = "{'cube_core_num': %d, 'vector_core_num': %d}"
    expected = [
        " ".join(form % pair for pair in ((12, 24), (13, 25), (14, 26))),
        f"{form % (12, 24)} 3.0",
    ]
    assert done.stdout.splitlines() == expected, done.stderr


def test_prefetch_accepts_only_memory_of_this_npu(acl):
    x, stream = torch.arange(64, device="npu"), torch.npu.Stream()
    torch.npu.synchronize()
    handle = c_void_p(stream.npu_stream)
    assert acl.aclrtCmoAsync(c_void_p(x.data_ptr()), c_size_t(x.nbytes), 0, handle) == 0
    stream.synchronize()
    assert torch.equal(x.cpu(), torch.arange(64))
    assert acl.aclrtCmoAsync(c_void_p(x.data_ptr()), c_size_t(x.nbytes), 3, handle) == 200006
    assert acl.aclrtCmoAsync(c_void_p(torch.ones(4).data_ptr()), c_size_t(16), 0, handle) != 0
    assert acl.aclrtCmoAsync(c_void_p(x.data_ptr()), c_size_t(0), 0, handle) == 100000


class ErrorInfo(ctypes.Structure):
    """aclrtErrorInfo."""

    _fields_ = (
        ("repairable", ctypes.c_uint8),
        ("detailed", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 2),
        ("kind", c_int32),
        ("count", c_size_t),
        ("ranges", c_uint64 * 320),
    )


def test_a_memory_error_is_told_until_it_is_repaired(acl):
    info, x = ErrorInfo(), torch.ones(1 << 20, device="npu")
    torch.npu.synchronize()
    assert acl.aclrtGetErrorVerbose(0, byref(info)) == 0
    assert (info.kind, info.repairable, info.detailed, info.count) == (0, 0, 0, 0)
    assert acl.aclrtRepairError(0, byref(info)) == 200006
    faults.inject("aclrtSynchronizeDevice", kind="uce")
    assert acl.aclrtSynchronizeDevice() != 0
    assert acl.aclrtGetErrorVerbose(0, byref(info)) == 0
    assert (info.kind, info.repairable, info.detailed, info.count) == (1, 1, 1, 1)
    assert info.ranges[1] == 64
    assert acl.aclrtRepairError(0, byref(info)) == 0
    assert acl.aclrtGetErrorVerbose(0, byref(info)) == 0
    assert info.kind == 0
    faults.clear()
    assert x.sum().item() == 1 << 20
