# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""CANN's runtime calls as other programs than torch_npu make them: devices, contexts, errors, waits
and copies."""

import ctypes
import os
import sys
import textwrap
import threading
from ctypes import byref, c_char_p, c_int32, c_size_t, c_uint64, c_void_p

import pytest
import torch
from ascend_emulator import cann_names, coverage
from sanitizers import without_sanitizers

PRELUDE = """
import ctypes, sys
from ctypes import byref, c_int32, c_size_t, c_void_p
import torch
acl = ctypes.CDLL("libascendcl.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
def last_message():
    return (acl.aclGetRecentErrMsg() or b"").decode()
"""


@pytest.fixture(scope="module")
def acl():
    torch.zeros(1, device="npu")
    library = ctypes.CDLL("libascendcl.so")
    library.aclGetRecentErrMsg.restype = c_char_p
    return library


@pytest.fixture
def program(run):
    """``program(text, *options)``: the output of a program that has not initialized CANN."""

    def start(text, *options, **environment):
        script = PRELUDE + textwrap.dedent(text)
        done = run(
            "run",
            *options,
            "--",
            sys.executable,
            "-c",
            script,
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
            **environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    return start


@pytest.mark.parametrize(
    ("name", "arguments", "parameter"),
    [
        ("aclrtGetDeviceCount", (None,), "count"),
        ("aclrtMalloc", (None, c_size_t(64), 0), "address"),
        ("aclrtCreateStream", (None,), "stream"),
        ("aclrtGetMemInfo", (0, byref(c_size_t()), None), "total"),
        ("aclrtMemGetAllocationGranularity", (b" " * 64, 0, None), "granularity"),
        ("aclGetCannAttribute", (1, None), "value"),
    ],
)
def test_a_null_output_is_refused(acl, name, arguments, parameter):
    assert getattr(acl, name)(*arguments) == 100000
    message = f"[ascend-emulator] {name}: {parameter} is null (CANN refuses, inferred)"
    assert acl.aclGetRecentErrMsg().decode() == message


def test_outputs_that_may_be_null(acl):
    active = c_int32()
    assert acl.aclrtGetPrimaryCtxState(0, None, byref(active)) == 0
    assert active.value == 1


def test_last_error_is_per_thread(acl):
    acl.aclrtGetLastError(0)
    assert acl.aclrtSetDevice(99) == 107001
    errors = []
    thread = threading.Thread(target=lambda: errors.append(acl.aclrtPeekAtLastError(0)))
    thread.start()
    thread.join()
    assert errors == [0]
    assert [acl.aclrtPeekAtLastError(0), acl.aclrtGetLastError(0), acl.aclrtGetLastError(0)] == [
        107001,
        107001,
        0,
    ]


def test_initialization_is_counted_once(program):
    calls = ("aclFinalize()", "aclInit(None)", "aclInit(None)", "aclFinalize()", "aclFinalize()")
    assert program("\n".join(f"print(acl.{call})" for call in calls)) == [
        "100001",
        "0",
        "100002",
        "0",
        "100037",
    ]


def test_a_device_is_reset_by_as_many_calls_as_set_it(program):
    text = """
        buffer, stream, size = c_void_p(), c_void_p(), c_size_t(4096)
        assert acl.aclrtSetDevice(0) == 0 and acl.aclrtSetDevice(0) == 0
        assert acl.aclrtMalloc(byref(buffer), size, 0) == 0 and acl.aclrtCreateStream(byref(stream)) == 0
        assert acl.aclrtResetDevice(0) == 0
        assert acl.aclrtMemset(buffer, size, 0, size) == 0 and acl.aclrtSynchronizeStream(stream) == 0
        assert acl.aclrtResetDevice(0) == 0
        assert acl.aclrtMalloc(byref(buffer), size, 0) == 107002
        print(last_message())
        assert acl.aclrtResetDevice(0) == 107002
        print(last_message())
        assert acl.aclrtSetDevice(0) == 0
        assert acl.aclrtMemset(buffer, size, 0, size) != 0
        print("where 0 are allocated" in last_message())
        assert acl.aclrtSynchronizeStream(stream) != 0
        print("is no stream, or it was destroyed" in last_message())
        free, total = c_size_t(), c_size_t()
        assert acl.aclrtGetMemInfo(0, byref(free), byref(total)) == 0
        print(free.value == total.value)
        assert acl.aclrtSetDevice(0) == 0 and acl.aclrtResetDeviceForce(0) == 0 and acl.aclrtSynchronizeDevice() == 107002
    """
    assert [line.removesuffix(" (CANN refuses, inferred)") for line in program(text)] == [
        "[ascend-emulator] aclrtMalloc: NPU 0 was reset (aclrtResetDevice)",
        "[ascend-emulator] aclrtResetDevice: NPU 0 was not set (aclrtSetDevice), or was reset",
        *["True"] * 3,
    ]


def test_a_reset_within_a_capture_ends_it(program):
    """In all threads: the mode global concerns each."""
    text = """
        import threading
        buffer, stream, other, event, graph, size = c_void_p(), c_void_p(), c_void_p(), c_void_p(), c_void_p(), c_size_t(4096)
        data = ctypes.create_string_buffer(4096)
        def copy():
            assert acl.aclrtSetDevice(0) == 0 and acl.aclrtMalloc(byref(buffer), size, 0) == 0
            return acl.aclrtMemcpy(buffer, size, data, size, 1)
        assert copy() == 0
        assert acl.aclrtCreateStream(byref(stream)) == 0 and acl.aclrtCreateStream(byref(other)) == 0
        assert acl.aclrtCreateEventWithFlag(byref(event), 0) == 0
        assert acl.aclmdlRICaptureBegin(stream, 0) == 0
        assert acl.aclrtMemsetAsync(buffer, size, 0, size, stream) == 0
        assert acl.aclrtRecordEvent(event, stream) == 0 and acl.aclrtStreamWaitEvent(other, event) == 0
        print(copy())
        assert acl.aclrtResetDeviceForce(0) == 0
        print(copy())
        thread = threading.Thread(target=lambda: print(copy()))
        thread.start()
        thread.join()
        print(acl.aclmdlRICaptureEnd(stream, byref(graph)) != 0, "is no stream, or it was destroyed" in last_message())
        assert acl.aclrtCreateStream(byref(stream)) == 0 and acl.aclmdlRICaptureBegin(stream, 0) == 0
        print(acl.aclmdlRICaptureEnd(stream, byref(graph)), acl.aclmdlRIExecuteAsync(graph, None))
    """
    assert program(text) == ["107030", "0", "0", "True True", "0 0"]


def test_a_reset_frees_physical_memory(program):
    text = """
        class Physical(ctypes.Structure):
            _fields_ = [(name, c_int32) for name in ("handle", "type", "attribute", "id", "location")] + [("no", ctypes.c_uint64)]
        free, total, handle, address, size = c_size_t(), c_size_t(), c_void_p(), c_void_p(), c_size_t(64 << 20)
        assert acl.aclrtSetDevice(0) == 0
        for mapped in range(2):
            properties = Physical(0, 0, 0, 0, 1, 0)
            assert acl.aclrtMallocPhysical(byref(handle), size, byref(properties), ctypes.c_uint64(0)) == 0
            if mapped:
                assert acl.aclrtReserveMemAddress(byref(address), size, c_size_t(0), None, ctypes.c_uint64(1)) == 0
                assert acl.aclrtMapMem(address, size, c_size_t(0), handle, ctypes.c_uint64(0)) == 0
        assert acl.aclrtGetMemInfo(0, byref(free), byref(total)) == 0
        print(total.value - free.value >> 20)
        assert acl.aclrtResetDeviceForce(0) == 0 and acl.aclrtSetDevice(0) == 0
        assert acl.aclrtGetMemInfo(0, byref(free), byref(total)) == 0
        print(total.value - free.value >> 20)
        print(acl.aclrtFreePhysical(handle) != 0, "is no physical memory" in last_message())
        print(acl.aclrtReleaseMemAddress(address))
    """
    assert program(text) == ["128", "0", "True True", "0"]


def test_devices_that_can_exchange_data_are_two(program):
    text = """
        can = c_int32(7)
        print(*(acl.aclrtDeviceCanAccessPeer(byref(can), *pair) for pair in ((0, 1), (1, 1), (0, 2), (-1, 0))), can.value)
    """
    assert program(text, "--npus", "2") == ["0 100000 107001 107001 1"]


def test_no_time_limit_of_operators_is_in_force(program):
    text = """
        actual = ctypes.c_uint64(7)
        print(acl.aclrtSetOpExecuteTimeOutV2(ctypes.c_uint64(5000), byref(actual)), actual.value == 2**64 - 1)
    """
    assert program(text) == ["0 True"]


def test_contexts_are_created_and_destroyed(program):
    text = """
        first, second, device = c_void_p(), c_void_p(), c_int32()
        assert acl.aclrtCreateContext(byref(first), 0) == 0 and acl.aclrtCreateContext(byref(second), 1) == 0
        for context, npu in ((first, 0), (second, 1)):
            assert acl.aclrtSetCurrentContext(context) == 0 and acl.aclrtGetDevice(byref(device)) == 0
            assert device.value == npu
        assert acl.aclrtDestroyContext(first) == 0
        assert acl.aclrtSetCurrentContext(first) != 0
        print("is no context, or it was destroyed" in last_message())
    """
    assert program(text, "--npus", "2") == ["True"]


def test_copies_between_npus_are_enabled_first(program):
    text = """
        buffers, size, status = [c_void_p(), c_void_p()], c_size_t(4096), c_int32(9)
        for npu, buffer in enumerate(buffers):
            assert acl.aclrtSetDevice(npu) == 0 and acl.aclrtMalloc(byref(buffer), size, 0) == 0
        copy = lambda: acl.aclrtMemcpy(buffers[1], size, buffers[0], size, 3)
        assert copy() == 100000
        assert acl.aclrtDeviceEnablePeerAccess(1, 0) == 100000
        print(last_message())
        for call, expected in ((acl.aclrtDeviceEnablePeerAccess, 1), (acl.aclrtDeviceDisablePeerAccess, 0)):
            assert call(0, 0) == 0
            assert acl.aclrtDevicePeerAccessStatus(0, 1, byref(status)) == 0 and status.value == expected
            assert (copy() == 0) == bool(expected)
    """
    message = "aclrtDeviceEnablePeerAccess: the peer is NPU 1, the current one; it must be another"
    assert program(text, "--npus", "2") == [f"[ascend-emulator] {message} (CANN refuses, inferred)"]


def uuids(program, visible):
    text = """
        count, uuid = ctypes.c_uint32(), ctypes.create_string_buffer(16)
        assert acl.aclrtGetDeviceCount(byref(count)) == 0
        for npu in range(count.value):
            assert acl.aclrtDeviceGetUuid(npu, uuid) == 0
            print(uuid.raw.hex())
    """
    return program(text, "--npus", "3", ASCEND_RT_VISIBLE_DEVICES=visible)


def test_uuids_identify_the_npus_of_the_machine(program):
    every = uuids(program, "")
    assert len(set(every)) == 3
    assert uuids(program, "0,2") == [every[0], every[2]]
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        assert every[0][:30] == boot_id.read().replace("-", "")[:30]


@pytest.fixture
def blocked_stream():
    """A stream whose task waits for an event of the host, and that event."""
    stream, end = torch.npu.Stream(), threading.Event()
    wait = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: end.wait(30) and None)
    torch.npu.current_stream().synchronize()
    assert (
        ctypes.CDLL("libascendcl.so").aclrtLaunchHostFunc(c_void_p(stream.npu_stream), wait, None)
        == 0
    )
    yield stream, end
    end.set()
    stream.synchronize()


def test_event_waits_are_complete_when_their_streams_continue(acl, blocked_stream):
    stream, end = blocked_stream
    other, event, status = torch.npu.Stream(), c_void_p(), c_int32(9)
    assert acl.aclrtCreateEventWithFlag(byref(event), 1) == 0
    assert acl.aclrtRecordEvent(event, c_void_p(stream.npu_stream)) == 0
    assert acl.aclrtStreamWaitEvent(c_void_p(other.npu_stream), event) == 0
    assert acl.aclrtQueryEventWaitStatus(event, byref(status)) == 0
    assert status.value == 1
    rates = (c_int32 * 4)()
    assert acl.aclrtGetDeviceUtilizationRate(0, rates) == 0
    assert list(rates) == [100, 100, 0, -1]
    end.set()
    other.synchronize()
    assert acl.aclrtQueryEventWaitStatus(event, byref(status)) == 0
    assert status.value == 0
    assert acl.aclrtDestroyEvent(event) == 0


def test_a_wait_for_an_event_ends_after_its_timeout(acl, blocked_stream):
    stream, _ = blocked_stream
    other, event = c_void_p(), c_void_p()
    assert acl.aclrtCreateStream(byref(other)) == 0
    assert acl.aclrtCreateEventWithFlag(byref(event), 1) == 0
    assert acl.aclrtRecordEvent(event, c_void_p(stream.npu_stream)) == 0
    assert acl.aclrtSetOpWaitTimeout(1) == 0
    assert acl.aclrtStreamWaitEvent(other, event) == 0
    assert acl.aclrtSetOpWaitTimeout(0) == 0
    assert acl.aclrtSynchronizeStream(other) != 0
    assert (
        "the event was not reached within 1 s (aclrtSetOpWaitTimeout)"
        in acl.aclGetRecentErrMsg().decode()
    )
    assert acl.aclrtDestroyStreamForce(other) == 0
    assert acl.aclrtDestroyEvent(event) == 0


def test_compile_options_are_kept(acl):
    room = ctypes.create_string_buffer(64)
    acl.aclGetCompileoptSize.restype = c_size_t
    assert acl.aclSetCompileopt(4, b"allow_mix_precision") == 0
    assert acl.aclGetCompileoptSize(4) == 20
    assert acl.aclGetCompileopt(4, room, c_size_t(64)) == 0
    assert room.value == b"allow_mix_precision"
    assert acl.aclGetCompileopt(4, room, c_size_t(19)) == 100000


def test_values_of_stream_attributes_are_checked(acl):
    stream = c_void_p(torch.npu.Stream().npu_stream)
    for attribute, value, status in (
        (1, 1, 0),
        (1, 2, 100000),
        (3, 2**32 - 1, 0),
        (5, 7, 0),
        (5, 8, 100000),
        (6, 0, 100000),
    ):
        assert acl.aclrtSetStreamAttribute(stream, attribute, byref(c_uint64(value))) == status
    assert acl.aclrtSetStreamAttribute(stream, 5, None) == 100000
    created = c_void_p()
    assert acl.aclrtCreateStreamWithConfig(byref(created), 0, 4) == 200006


def test_rows_of_a_matrix_are_copied(acl):
    host, here = (
        torch.arange(24, dtype=torch.uint8).view(4, 6),
        torch.zeros(4, 8, dtype=torch.uint8, device="npu"),
    )
    stream = c_void_p(torch.npu.current_stream().npu_stream)
    torch.npu.synchronize()

    def call(name, to, to_pitch, source, source_pitch, kind, *more):
        pitches = c_size_t(to_pitch), c_void_p(source.data_ptr()), c_size_t(source_pitch)
        return getattr(acl, name)(
            c_void_p(to.data_ptr()), *pitches, c_size_t(5), c_size_t(4), kind, *more
        )

    assert call("aclrtMemcpy2d", here, 8, host, 6, 1) == 0
    assert torch.equal(here.cpu()[:, :5], host[:, :5])
    assert not here[:, 5:].any()
    back = torch.zeros(4, 5, dtype=torch.uint8, pin_memory=True)
    assert call("aclrtMemcpy2dAsync", back, 5, here, 8, 2, stream) == 0
    torch.npu.synchronize()
    assert torch.equal(back, host[:, :5])
    assert call("aclrtMemcpy2d", here, 8, here, 8, 3) == 100000
    assert call("aclrtMemcpy2d", here, 4, host, 6, 1) == 100000


def test_error_of_an_argument_names_its_operator(acl):
    """Not that of a later operator whose optional argument is absent."""
    acl.aclCreateTensor.restype = c_void_p
    dims = (ctypes.c_int64 * 1)(3)
    assert (
        acl.aclCreateTensor(
            dims, c_uint64(1), 999, dims, ctypes.c_int64(0), 2, dims, c_uint64(1), None
        )
        is None
    )
    assert acl.aclnnDequantBiasGetWorkspaceSize() != 0
    x = torch.ones(2, 3, device="npu")
    assert torch.nn.functional.layer_norm(x, (3,)).sum().item() == 0


def test_public_names_are_there_and_refuse(acl):
    names = {point.name for point in coverage.entry_points()}
    assert cann_names.public_names().keys() <= names
    assert {
        "aclrtMemGetAllocationGranularity",
        "aclrtGetRunMode",
        "aclrtCreateContext",
        "aclrtMemcpy2d",
    } <= names
    assert acl.aclSetTensorAddr(None, c_size_t(0), None, None) == 200006
    assert "aclSetTensorAddr is not emulated" in acl.aclGetRecentErrMsg().decode()
    mode, granularity = c_int32(), c_size_t()
    assert acl.aclrtGetRunMode(byref(mode)) == 0
    assert acl.aclrtMemGetAllocationGranularity(b" " * 64, 1, byref(granularity)) == 0
    assert (mode.value, granularity.value) == (1, 2 << 20)


def test_a_public_name_without_a_status_says_that_it_refuses(acl, capfd):
    assert acl.aclDataTypeSize(0) == 0
    assert "aclDataTypeSize is not emulated" in capfd.readouterr().err


def test_runtime_module_of_python_copies_memory(program):
    text = """
        from acl.rt import memcpy
        buffer, size = c_void_p(), c_size_t(4096)
        assert acl.aclrtSetDevice(0) == 0 and acl.aclrtMalloc(byref(buffer), size, 0) == 0
        source, back = ctypes.create_string_buffer(b"copied", 16), ctypes.create_string_buffer(16)
        assert memcpy(buffer.value, 16, ctypes.addressof(source), 16, 1) == 0
        assert memcpy(ctypes.addressof(back), 16, buffer.value, 16, 2) == 0
        assert memcpy(buffer.value, 8, ctypes.addressof(source), 16, 1) != 0
        print(back.value.decode())
    """
    assert program(text) == ["copied"]


def test_sleeps_of_the_program_stay_precise(run):
    """Only torch_npu's thread that polls has a timer slack of 1 ms."""
    script = """
        import contextlib, pathlib, time, torch, torch_npu
        before = pathlib.Path("/proc/self/timerslack_ns").read_text()
        torch.ones(1).npu()
        assert pathlib.Path("/proc/self/timerslack_ns").read_text() == before
        named, deadline = [], time.monotonic() + 30  # the thread names itself once it runs
        while not named and time.monotonic() < deadline:
            for comm in pathlib.Path("/proc/self/task").glob("*/comm"):
                with contextlib.suppress(OSError):  # a thread that has ended
                    named += [comm.parent.name] if comm.read_text() == "release_thread\\n" else []
        print([pathlib.Path(f"/proc/{task}/timerslack_ns").read_text().strip() for task in named])
    """
    done = run("run", "--", sys.executable, "-c", textwrap.dedent(script))
    assert done.stdout == "['1000000']\n", done.stderr


@without_sanitizers("their own mappings exceed the limit")
def test_memory_that_the_machine_does_not_give_is_named(run):
    program = f"ulimit -d 1500000; exec {sys.executable} -c 'import torch; torch.ones(1).npu()'"
    done = run("run", "--memory", "8GiB", "--", "bash", "-c", program)
    assert (
        "ascend-emulator: cannot map 8589934592 bytes for 1 NPUs: Cannot allocate memory"
        in done.stderr
    )


def memory_file():
    files = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return next(
        os.stat(file).st_size
        for file in files
        if os.path.exists(file) and "emulator-memory" in os.readlink(file)
    )


def test_freed_physical_memory_is_used_again(acl):
    from memory_calls import Physical

    def allocate():
        handle = c_void_p()
        assert (
            acl.aclrtMallocPhysical(
                byref(handle), c_size_t(8 << 20), byref(Physical(location=(0, 1))), c_uint64(0)
            )
            == 0
        )
        return handle

    first = allocate()
    before = memory_file()
    for _ in range(5):
        second = allocate()
        assert acl.aclrtFreePhysical(second) == 0
    assert acl.aclrtFreePhysical(first) == 0
    assert memory_file() <= before + (8 << 20)


def test_an_event_without_flags_measures_times(acl):
    """aclrtCreateEvent, which torch_npu does not call."""
    started, ended, milliseconds = c_void_p(), c_void_p(), ctypes.c_float(-1)
    for event in (started, ended):
        assert acl.aclrtCreateEvent(byref(event)) == 0
        assert acl.aclrtRecordEvent(event, None) == 0
    assert acl.aclrtSynchronizeEvent(ended) == 0
    assert acl.aclrtEventElapsedTime(byref(milliseconds), started, ended) == 0
    assert milliseconds.value >= 0
    for event in (started, ended):
        assert acl.aclrtDestroyEvent(event) == 0


def test_kernel_for_npu_cores_is_refused_by_its_name(program):
    """Launches of Triton and AscendC: a binary is loaded, then its kernel is looked up."""
    lines = program("""
        binary, code = c_void_p(), b"machine code"
        print(acl.aclrtBinaryLoadFromData(code, c_size_t(len(code)), None, byref(binary)))
        print(acl.aclrtBinaryGetFunction(binary, b"_topk_kernel", byref(c_void_p())), last_message())
        print(acl.aclrtBinaryUnLoad(binary))
        description = (ctypes.c_uint64 * 3)(0x43554245, ctypes.cast(code, c_void_p).value, len(code))
        print(acl.rtDevBinaryRegister(description, byref(binary)))
        stub = c_size_t()
        print(acl.rtFunctionRegister(binary, byref(stub), b"_topk_kernel_0", b"_topk_kernel", 0), last_message())
        print(acl.rtKernelLaunch(byref(stub), 1, None, 0, None, None), last_message())
    """)
    assert [lines[0], lines[2], lines[3]] == ["0", "0", "0"]
    refused = (
        "200006 [ascend-emulator] the kernel '{}' ({}) is not emulated: it is compiled for the"
        " NPU's cores. "
    )
    assert lines[1].startswith(refused.format("_topk_kernel", "aclrtBinaryGetFunction"))
    assert lines[4].startswith(refused.format("_topk_kernel_0", "rtFunctionRegister"))
    assert lines[5].startswith("200006 [ascend-emulator] rtKernelLaunch is not emulated")
