# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Graphs whose memory, streams, groups or conditions end before they do, and captures by several
threads."""

import ctypes
import re
import sys
import threading

import pytest
import torch
from memory_calls import DEVICE, MIB, Location, Physical, acl
from runtime_calls import ConditionalTask, begin, call, copy, end, fill, memory, new, replay
from sanitizers import without_sanitizers


@pytest.fixture(autouse=True)
def opened_npu():
    torch.ones(1, device="npu").sum().item()


@pytest.fixture
def stream():
    """A function that creates streams, which end with the test."""
    streams = []

    def create():
        streams.append(new("aclrtCreateStream"))
        return streams[-1]

    yield create
    for each in streams:
        acl.aclrtDestroyStreamForce(each)


@pytest.fixture
def captured(stream):
    def capture(body):
        on = stream()
        begin(on)
        body(on)
        return end(on), on

    return capture


@pytest.mark.parametrize("argument", ["fill", "to", "source"])
@pytest.mark.parametrize("again", [False, True])
def test_replayed_copy_of_freed_memory_is_refused(captured, argument, again):
    kept, freed = memory(), memory()

    def body(on):
        if argument == "fill":
            fill(freed, 1, on)
        else:
            copy(*((freed, kept) if argument == "to" else (kept, freed)), on)

    graph, on = captured(body)
    replay(graph, on)
    call("aclrtFree", freed)
    addresses = [memory() for _ in range(3 if again else 0)]
    assert not again or any(other.value == freed.value for other in addresses)
    what = "freed after the call, and allocated again" if again else "freed after the call"
    with pytest.raises(
        RuntimeError,
        match=rf"\(node 0 of graph \d+\): .*4096 bytes at 0x[0-9a-f]+, which were {what}",
    ):
        replay(graph, on)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_replayed_operator_on_freed_memory_is_refused(run, expandable, again):
    script = f"""
import torch, torch_npu
x = torch.ones(8 << 20, device="npu")
address = x.data_ptr()
graph = torch.npu.NPUGraph()
torch.npu.synchronize()
with torch.npu.graph(graph):
    y = x * 2
graph.replay()
torch.npu.synchronize()
del x
torch.npu.empty_cache()
if {again}:
    x = torch.empty(8 << 20, dtype=torch.int32, device="npu")
    assert x.data_ptr() == address
graph.replay()
try:
    torch.npu.synchronize()
except RuntimeError as error:
    print(error)
"""
    environ = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
    done = run("run", "--", sys.executable, "-c", script, **environ)
    what = (
        "freed after the call, and allocated again"
        if again
        else f"{'unmapped' if expandable else 'freed'} after the call"
    )
    expected = f"bytes at 0x[0-9a-f]+, which were {what} \\(undefined on the device\\)\n"
    assert done.returncode == 0
    assert re.search(r"aclnnMuls \(node 0 of graph 0\): self, 33554432 " + expected, done.stdout), (
        done
    )


def test_memory_that_is_mapped_again_at_its_address_is_the_same(captured):
    """Sleep mode unmaps physical memory and maps other memory at the reserved addresses: graphs
    remain valid."""
    size, nothing = ctypes.c_size_t(2 * MIB), ctypes.c_void_p()
    properties = Physical(0, 0, 0, Location(0, DEVICE), 0)
    address = new("aclrtReserveMemAddress", size, ctypes.c_size_t(0), nothing, ctypes.c_uint64(1))

    def mapped():
        handle = new("aclrtMallocPhysical", size, ctypes.byref(properties), ctypes.c_uint64(0))
        call("aclrtMapMem", address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        return handle

    def unmap(handle):
        call("aclrtUnmapMem", address)
        call("aclrtFreePhysical", handle)

    first = mapped()
    graph, on = captured(lambda on: fill(address, 1, on))
    replay(graph, on)
    unmap(first)
    second = mapped()
    replay(graph, on)
    unmap(second)
    with pytest.raises(RuntimeError, match="which were unmapped after the call"):
        replay(graph, on)
    call("aclrtReleaseMemAddress", address)


def test_replayed_copy_of_freed_pinned_memory_is_refused(captured):
    host, onto = new("aclrtMallocHost", ctypes.c_size_t(4096)), memory()
    graph, on = captured(lambda on: copy(onto, host, on, kind=1))
    replay(graph, on)
    call("aclrtFreeHost", host)
    with pytest.raises(
        RuntimeError, match="the source is host memory that was freed after the call"
    ):
        replay(graph, on)


def test_stream_write_to_freed_memory_is_refused(captured):
    at = memory()
    graph, on = captured(lambda on: call("aclrtValueWrite", at, ctypes.c_uint64(1), 0, on))
    call("aclrtFree", at)
    with pytest.raises(RuntimeError, match="which were freed after the call"):
        replay(graph, on)


def test_captures_that_end_invalid_return_their_streams(stream):
    on, lonely, event = stream(), stream(), new("aclrtCreateEventWithFlag", 0)
    at = memory()
    for _ in range(2100):
        begin(on)
        call("aclrtRecordEvent", event, on)
        call("aclrtStreamWaitEvent", lonely, event)
        fill(at, 0, lonely)
        with pytest.raises(RuntimeError, match="was not joined"):
            end(on)
    begin(on)
    end(on)


def test_groups_and_conditions_end_with_their_graph(stream):
    free = ctypes.c_size_t(), ctypes.c_size_t()

    def left():
        call("aclrtGetMemInfo", 1, ctypes.byref(free[0]), ctypes.byref(free[1]))
        return free[0].value

    before, on, at = left(), stream(), memory()
    begin(on)
    status, graph, condition, group = (
        ctypes.c_int32(),
        ctypes.c_void_p(),
        ctypes.c_void_p(),
        ctypes.c_void_p(),
    )
    call("aclmdlRICaptureGetInfo", on, ctypes.byref(status), ctypes.byref(graph))
    call("aclmdlRICondHandleCreate", graph, 0, 0, ctypes.byref(condition))
    call("aclmdlRICaptureTaskGrpBegin", on)
    fill(at, 0, on)
    call("aclmdlRICaptureTaskGrpEnd", on, ctypes.byref(group))
    end(on)
    call("aclmdlRIDestroy", graph)
    call("aclrtFree", at)
    assert left() == before
    with pytest.raises(RuntimeError, match="is no task group"):
        call("aclmdlRICaptureTaskUpdateBegin", on, group)


def test_a_task_group_has_the_tasks_of_its_stream(run):
    script = """
import torch, torch_npu
x, out = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
graph, update, side = torch.npu.NPUGraph(), torch.npu.Stream(), torch.npu.Stream()
torch.npu.synchronize()
with torch.npu.graph(graph):
    main = torch.npu.current_stream()
    side.wait_stream(main)
    with torch.npu.stream(side):
        torch.npu.graph_task_group_begin(side)
        torch.mul(x, 2.0, out=out)
        handle = torch.npu.graph_task_group_end(side)
    main.wait_stream(side)
with torch.npu.stream(update):
    torch.npu.graph_task_update_begin(update, handle)
    torch.mul(x, 3.0, out=out)
    torch.npu.graph_task_update_end(update)
torch.npu.synchronize()
graph.replay()
print(out.tolist())
"""
    done = run("run", "--", sys.executable, "-c", script)
    assert done.stdout == "[3.0, 3.0, 3.0, 3.0]\n", done.stderr


def test_a_stream_cannot_be_destroyed_during_its_capture(stream):
    on = stream()
    begin(on)
    with pytest.raises(
        RuntimeError, match=r"107027: .*the stream is being captured; end the capture first"
    ):
        call("aclrtDestroyStream", on)
    end(on)
    call("aclrtDestroyStream", on)


@without_sanitizers("freed memory is not used again")
def test_a_new_stream_has_no_subscription_of_a_destroyed_one(stream):
    handles = set()
    for _ in range(50):
        on = stream()
        handles.add(on.value)
        call("aclrtSubscribeReport", ctypes.c_uint64(threading.get_ident()), on)
        call("aclrtDestroyStream", on)
    assert len(handles) < 50  # A new stream may have the handle of a destroyed one.


def test_a_graph_cannot_run_while_it_is_captured(stream):
    on, other, status, graph = stream(), stream(), ctypes.c_int32(), ctypes.c_void_p()
    begin(on)
    call("aclmdlRICaptureGetInfo", on, ctypes.byref(status), ctypes.byref(graph))
    with pytest.raises(RuntimeError, match="the graph is being captured"):
        call("aclmdlRIExecuteAsync", graph, other)
    end(on)


def test_a_while_over_an_empty_branch_can_be_aborted(stream):
    on, status, graph = stream(), ctypes.c_int32(), ctypes.c_void_p()
    condition, branch = ctypes.c_void_p(), ctypes.c_void_p()
    begin(on)
    call("aclmdlRICaptureGetInfo", on, ctypes.byref(status), ctypes.byref(graph))
    call("aclmdlRICondHandleCreate", graph, 1, 1, ctypes.byref(condition))
    call("aclmdlRIAddCondTask", ConditionalTask(condition, 1, 1, ctypes.pointer(branch)), on, 0)
    end(on)
    call("aclmdlRIExecuteAsync", graph, on)
    with pytest.raises(RuntimeError, match="the deadline passed"):
        call("aclrtSynchronizeStreamWithTimeout", on, 100)
    call("aclrtDestroyStreamForce", on)
    call("aclrtSynchronizeDevice")
