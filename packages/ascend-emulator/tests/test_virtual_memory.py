# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Address ranges, physical memory and mappings, as torch-npu's expandable segments use them; memory
shared between processes."""

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Listener

import pytest
import torch
from memory_calls import DEVICE, HOST, MIB, Physical, acl, address_of, check, refused


def physical(size=2 * MIB, location=DEVICE, npu=0):
    handle = ctypes.c_void_p()
    check(
        acl.aclrtMallocPhysical(
            ctypes.byref(handle),
            ctypes.c_size_t(size),
            ctypes.byref(Physical(location=(npu, location))),
            0,
        )
    )
    return handle


def reserve(size=16 * MIB):
    address = ctypes.c_void_p()
    check(acl.aclrtReserveMemAddress(ctypes.byref(address), ctypes.c_size_t(size), 0, None, 1))
    return address.value


def map_at(address, handle, size=2 * MIB):
    return acl.aclrtMapMem(ctypes.c_void_p(address), ctypes.c_size_t(size), 0, handle, 0)


def unmap(address):
    return acl.aclrtUnmapMem(ctypes.c_void_p(address))


def write(address, data, room=None):
    return acl.aclrtMemcpy(
        ctypes.c_void_p(address),
        ctypes.c_size_t(room or len(data)),
        data,
        ctypes.c_size_t(len(data)),
        1,
    )


def read(address, size):
    data = ctypes.create_string_buffer(size)
    check(
        acl.aclrtMemcpy(
            data, ctypes.c_size_t(size), ctypes.c_void_p(address), ctypes.c_size_t(size), 2
        )
    )
    return data.raw


@pytest.fixture(autouse=True)
def initialized():
    torch.zeros(1, device="npu:0")


@pytest.fixture
def range_of_three():
    """Three chunks mapped one behind the other, and the free address range behind them."""
    start, chunks = reserve(), [physical() for _ in range(3)]
    for i, chunk in enumerate(chunks):
        check(map_at(start + i * 2 * MIB, chunk))
    yield start, chunks
    for i, chunk in enumerate(chunks):
        if chunk:
            check(unmap(start + i * 2 * MIB))
            check(acl.aclrtFreePhysical(chunk))
    check(acl.aclrtReleaseMemAddress(ctypes.c_void_p(start)))


def test_bytes_across_chunks(range_of_three):
    start, _ = range_of_three
    data = os.urandom(3 * MIB)
    check(write(start + MIB, data))
    assert read(start + MIB, len(data)) == data


def test_what_is_not_mapped_is_refused(range_of_three):
    start, chunks = range_of_three
    assert "2097152 bytes" in refused(write(start + 5 * MIB, b"x" * 2 * MIB))
    assert "where 0 are allocated" in refused(write(start + 6 * MIB, b"x"))
    check(unmap(start + 2 * MIB))
    assert "where 0 are allocated" in refused(write(start + 2 * MIB, b"x"))
    assert "where 1 are allocated" in refused(write(start + 2 * MIB - 1, b"xy"))
    check(write(start, b"x"))
    check(acl.aclrtFreePhysical(chunks[1]))
    chunks[1] = None


def test_memory_keeps_its_bytes_at_another_address(range_of_three):
    start, chunks = range_of_three
    check(write(start, b"moved"))
    check(unmap(start))
    assert map_at(start + 10 * MIB, chunks[0]) == 0
    assert read(start + 10 * MIB, 5) == b"moved"
    check(unmap(start + 10 * MIB))
    check(map_at(start, chunks[0]))


def test_calls_in_a_wrong_order_are_refused(range_of_three):
    start, chunks = range_of_three
    assert "mapped already" in refused(map_at(start, chunks[0]))
    assert "still mapped" in refused(acl.aclrtFreePhysical(chunks[0]))
    assert "still has memory mapped" in refused(acl.aclrtReleaseMemAddress(ctypes.c_void_p(start)))
    assert "no memory is mapped" in refused(unmap(start + 8 * MIB))
    assert "not in one reserved" in refused(map_at(start + 15 * MIB + MIB, chunks[0]))
    assert "multiples of" in refused(map_at(start + 7 * MIB, chunks[0]))
    assert "as a whole" in refused(map_at(start + 8 * MIB, chunks[0], MIB))
    assert "no physical memory" in refused(acl.aclrtFreePhysical(ctypes.c_void_p(12345)))
    assert "multiple of" in refused(
        acl.aclrtMallocPhysical(
            ctypes.byref(ctypes.c_void_p()),
            ctypes.c_size_t(MIB),
            ctypes.byref(Physical(location=(0, DEVICE))),
            0,
        )
    )


def test_physical_memory_counts_against_the_npus():
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    chunk = physical(64 * MIB)
    assert torch.npu.mem_get_info() == (free - 64 * MIB, total)
    big = free // (2 * MIB) * 2 * MIB
    handle, properties = ctypes.c_void_p(), Physical(location=(0, DEVICE))
    message = refused(
        acl.aclrtMallocPhysical(
            ctypes.byref(handle), ctypes.c_size_t(big), ctypes.byref(properties), 0
        ),
        207001,
    )
    assert "out of memory on NPU 0" in message
    check(acl.aclrtFreePhysical(chunk))
    assert torch.npu.mem_get_info() == (free, total)


def test_host_memory_is_the_hosts_too():
    start, chunk = reserve(), physical(location=HOST)
    check(map_at(start, chunk))
    ctypes.memmove(start, b"from the host", 13)
    assert ctypes.string_at(start, 13) == b"from the host"
    here = torch.zeros(13, dtype=torch.uint8, device="npu")
    check(
        acl.aclrtMemcpy(
            address_of(here), ctypes.c_size_t(13), ctypes.c_void_p(start), ctypes.c_size_t(13), 1
        )
    )
    assert bytes(here.cpu().tolist()) == b"from the host"
    check(unmap(start))
    check(acl.aclrtFreePhysical(chunk))
    check(acl.aclrtReleaseMemAddress(ctypes.c_void_p(start)))


IMPORTER = """
import ctypes, os, sys
from multiprocessing.connection import Client
import torch, torch_npu
torch.zeros(1, device="npu")
sys.path.insert(0, {tests!r})
from memory_calls import MIB, acl, message
import test_virtual_memory as calls

kind, key = sys.argv[1], sys.argv[2]
with Client({socket!r}) as parent:
    def open_it():
        if kind == "key":
            address = ctypes.c_void_p()
            return acl.aclrtIpcMemImportByKey(ctypes.byref(address), key.encode(), 1), address.value
        handle = ctypes.c_void_p()
        status = acl.aclrtMemImportFromShareableHandle(ctypes.c_uint64(int(key)), 0, ctypes.byref(handle))
        if status:
            return status, None
        start = calls.reserve()
        return calls.map_at(start, handle), start
    parent.send(os.getpid())
    parent.recv()
    status, address = open_it()
    parent.send(message() if status else calls.read(address, 5))
    if not status:
        parent.recv()
        calls.check(calls.write(address, b"there"))
        parent.send("written")
        if kind == "key":
            calls.check(acl.aclrtIpcMemClose(key.encode()))
            assert "not device memory" in calls.refused(calls.write(address, b"x")) or True
"""


@pytest.fixture
def importer(tmp_path):
    """``importer(kind, key)``: a process that imports the memory when it is told to, and its
    connection."""
    import subprocess

    started = []

    def start(kind, key):
        socket = str(tmp_path / f"socket{len(started)}")
        script = IMPORTER.format(tests=os.path.dirname(__file__), socket=socket)
        listener = Listener(socket)
        listener._listener._socket.settimeout(100)
        process = subprocess.Popen([sys.executable, "-c", script, kind, str(key)])
        connection = listener.accept()
        started.append((process, connection, listener))
        return connection

    def kill():
        process, *_ = started[-1]
        process.kill()
        process.wait(60)

    start.kill = kill
    yield start
    for process, connection, listener in started:
        connection.close()
        listener.close()
        assert process.wait(60) in (0, -signal.SIGKILL)


def exchanged(connection, let_in=None):
    process = connection.recv()
    if let_in:
        let_in(ctypes.byref(ctypes.c_int32(process)))
    connection.send("go")
    assert connection.poll(60)
    return connection.recv()


@pytest.mark.parametrize("listed", [True, False])
def test_physical_memory_is_shared_with_listed_processes(range_of_three, importer, listed):
    start, chunks = range_of_three
    check(write(start, b"hello"))
    handle = ctypes.c_uint64()
    check(
        acl.aclrtMemExportToShareableHandle(chunks[0], 0, ctypes.c_uint64(0), ctypes.byref(handle))
    )
    connection = importer("handle", handle.value)
    allow = (
        (lambda process: check(acl.aclrtMemSetPidToShareableHandle(handle, process, 1)))
        if listed
        else None
    )
    answer = exchanged(connection, allow)
    if not listed:
        assert "is not in the list" in answer
        return
    assert answer == b"hello"
    connection.send("go")
    assert connection.recv() == "written"
    assert read(start, 5) == b"there"


def resident():
    """Bytes of the file with memory that other processes can map."""
    target = "/memfd:ascend-emulator-memory (deleted)"
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path) and os.readlink(path) == target:
            return os.stat(path).st_blocks * 512
    return 0


def test_memory_of_a_killed_importer_is_freed(importer):
    before = resident()
    chunk, start, handle = physical(), reserve(), ctypes.c_uint64()
    check(map_at(start, chunk))
    check(write(start, os.urandom(2 * MIB)))
    assert resident() == before + 2 * MIB
    check(acl.aclrtMemExportToShareableHandle(chunk, 0, ctypes.c_uint64(1), ctypes.byref(handle)))
    connection = importer("handle", handle.value)
    assert len(exchanged(connection)) == 5
    check(unmap(start))
    check(acl.aclrtFreePhysical(chunk))
    assert resident() == before + 2 * MIB  # the importer reads it
    importer.kill()
    check(acl.aclrtFreePhysical(physical()))
    assert resident() == before
    check(acl.aclrtReleaseMemAddress(ctypes.c_void_p(start)))


def test_a_handle_of_a_process_that_ended_opens_nothing():
    """Also if another process has its number: the handle has a random part."""
    chunk, handle, out = physical(), ctypes.c_uint64(), ctypes.c_void_p()
    check(acl.aclrtMemExportToShareableHandle(chunk, 0, ctypes.c_uint64(1), ctypes.byref(handle)))
    check(acl.aclrtMemImportFromShareableHandle(handle, 0, ctypes.byref(out)))
    check(acl.aclrtFreePhysical(out))
    other = ctypes.c_uint64(handle.value ^ 1 << 63)
    assert "shares no memory: it ended" in refused(
        acl.aclrtMemImportFromShareableHandle(other, 0, ctypes.byref(out))
    )
    check(acl.aclrtFreePhysical(chunk))


def test_memory_of_another_call_is_not_unmapped():
    """aclrtUnmapMem undoes aclrtMapMem only."""
    x, key, address = (
        torch.zeros(2 * MIB, dtype=torch.uint8, device="npu"),
        ctypes.create_string_buffer(65),
        ctypes.c_void_p(),
    )
    check(
        acl.aclrtIpcMemGetExportKey(
            address_of(x), ctypes.c_size_t(x.numel()), key, ctypes.c_size_t(65), ctypes.c_uint64(1)
        )
    )
    check(acl.aclrtIpcMemImportByKey(ctypes.byref(address), key, ctypes.c_uint64(0)))
    assert "no memory is mapped at" in refused(acl.aclrtUnmapMem(address))
    check(write(address.value, b"still there"))
    check(acl.aclrtIpcMemClose(key))


def test_addresses_without_an_allocation_are_not_freed():
    start = reserve()
    assert "not an allocation of aclrtMalloc" in refused(
        acl.aclrtFree(ctypes.c_void_p(start)), 100000
    )
    check(acl.aclrtReleaseMemAddress(ctypes.c_void_p(start)))


def test_ordinary_memory_is_shared_by_key(importer):
    x = torch.zeros(3 * MIB, dtype=torch.uint8, device="npu")
    x[:5] = torch.tensor(list(b"hello"), dtype=torch.uint8)
    torch.npu.synchronize()
    key = ctypes.create_string_buffer(65)
    check(
        acl.aclrtIpcMemGetExportKey(
            address_of(x), ctypes.c_size_t(x.numel()), key, ctypes.c_size_t(65), ctypes.c_uint64(1)
        )
    )
    connection = importer("key", key.value.decode())
    assert exchanged(connection) == b"hello"
    connection.send("go")
    assert connection.recv() == "written"
    assert bytes(x[:5].tolist()) == b"there"
    check(acl.aclrtIpcMemClose(key))
    again = importer("key", key.value.decode())
    assert "does not share memory" in exchanged(again)


EXPANDABLE = """
import torch, torch_npu
MIB = 1 << 20
free, total = torch.npu.mem_get_info()
held = [torch.full((n * MIB // 4,), n, dtype=torch.int32, device="npu") for n in range(1, 40, 3)]
before = torch.npu.memory_reserved()
segments = [s for s in torch.npu.memory_snapshot() if s["is_expandable"]]
assert segments, "no segment is expandable"
for n, x in zip(range(1, 40, 3), held):
    assert x.min().item() == x.max().item() == n
del held[2:], x
torch.npu.empty_cache()
assert torch.npu.memory_reserved() < before
assert free - torch.npu.mem_get_info()[0] >= torch.npu.memory_reserved()  # torch-npu keeps physical memory that it unmapped
held.clear()
torch.npu.empty_cache()
assert torch.npu.memory_reserved() == 0
try:
    torch.empty(total + 1, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError as error:
    print("out of memory:", error)
y = torch.ones(total * 3 // 4, dtype=torch.uint8, device="npu")
print("sum of a part", y[::MIB].sum().item() == -(-y.numel() // MIB))
"""


def test_expandable_segments(run):
    done = run(
        "run",
        "--memory",
        "1GiB",
        "--",
        sys.executable,
        "-c",
        EXPANDABLE,
        PYTORCH_NPU_ALLOC_CONF="expandable_segments:True",
    )
    assert done.returncode == 0, done.stderr
    assert "out of memory: NPU out of memory" in done.stdout
    assert "sum of a part True" in done.stdout


SHARING = """
import os
import torch, torch_npu
import torch.multiprocessing as mp

def child(queue, answers):
    x, y = queue.get()
    answers.put((x.device.type, x.sum().item(), y.sum().item()))
    x.fill_(7)
    torch.npu.synchronize()
    del x, y
    answers.put("done")

if __name__ == "__main__":
    mp.set_start_method("spawn")
    queue, answers = mp.SimpleQueue(), mp.SimpleQueue()
    process = mp.Process(target=child, args=(queue, answers))
    process.start()
    x = torch.ones(1000, 1000, device="npu")
    y = torch.arange(10, device="npu")
    queue.put((x, y))
    assert answers.get() == ("npu", 1e6, 45)
    assert answers.get() == "done"
    process.join(60)
    assert x.sum().item() == 7e6, x.sum()
    print("shared")
"""


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_tensors_are_shared_with_a_process(run, tmp_path, settings):
    script = tmp_path / "sharing.py"
    script.write_text(SHARING)
    done = run(
        "run",
        "--memory",
        "1GiB",
        "--",
        sys.executable,
        str(script),
        PYTORCH_NPU_ALLOC_CONF=settings,
    )
    assert done.returncode == 0, done.stderr
    assert "shared" in done.stdout
