# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Device and host memory beyond plain tensors: what an address is, registered and batch copies,
allocators, leaks, poison."""

import ctypes
import mmap
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch_npu
from ascend_emulator import build
from memory_calls import (
    DEVICE,
    HOST,
    MIB,
    UNREGISTERED,
    Attributes,
    Batch,
    acl,
    address_of,
    check,
    refused,
)


@pytest.fixture(autouse=True)
def initialized():
    torch.zeros(1, device="npu:0")


def size(value):
    return ctypes.c_size_t(value)


def attributes(address):
    result = Attributes()
    check(acl.aclrtPointerGetAttributes(ctypes.c_void_p(address), ctypes.byref(result)))
    return result.location.type, result.location.id


def test_what_an_address_is():
    here, pinned, plain = torch.ones(5, device="npu"), torch.ones(5, pin_memory=True), torch.ones(5)
    assert attributes(here.data_ptr() + 4) == (DEVICE, 0)
    assert attributes(pinned.data_ptr() + 4) == (HOST, 0)
    assert attributes(plain.data_ptr())[0] == UNREGISTERED
    assert pinned.is_pinned()
    assert not plain.is_pinned()
    assert "where 0 are allocated" in refused(
        acl.aclrtPointerGetAttributes(
            ctypes.c_void_p(here.data_ptr() + (1 << 30)), ctypes.byref(Attributes())
        )
    )


def test_host_memory_can_be_registered():
    room = mmap.mmap(-1, 8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    assert attributes(address)[0] == UNREGISTERED
    check(acl.aclrtHostRegisterV2(ctypes.c_void_p(address), ctypes.c_uint64(4096), 0x10000000))
    assert attributes(address + 4095)[0] == HOST
    assert attributes(address + 4096)[0] == UNREGISTERED
    assert "registered already" in refused(
        acl.aclrtHostRegisterV2(ctypes.c_void_p(address), ctypes.c_uint64(4096), 2)
    )
    check(acl.aclrtHostUnregister(ctypes.c_void_p(address)))
    assert attributes(address)[0] == UNREGISTERED
    assert "not registered" in refused(acl.aclrtHostUnregister(ctypes.c_void_p(address)))
    # only pinned, at any address
    check(acl.aclrtHostRegisterV2(ctypes.c_void_p(address + 1), ctypes.c_uint64(64), 0x10000000))
    assert attributes(address + 64)[0] == HOST
    check(acl.aclrtHostUnregister(ctypes.c_void_p(address + 1)))
    assert "multiple of 4096" in refused(
        acl.aclrtHostRegisterV2(ctypes.c_void_p(address + 1), ctypes.c_uint64(64), 2)
    )
    assert "flags are 4" in refused(
        acl.aclrtHostRegisterV2(ctypes.c_void_p(address), ctypes.c_uint64(64), 4)
    )
    assert "not memory of aclrtMallocHost" in refused(acl.aclrtFreeHost(ctypes.c_void_p(address)))


def test_operators_compute_in_swapped_memory():
    x = torch_npu.empty_with_swapped_memory([100, 20], dtype=torch.float32, device="npu:0")
    x.fill_(3)
    y = torch.arange(100.0, device="npu").unsqueeze(1)
    x += y
    expected = torch.arange(100.0).unsqueeze(1) + 3
    assert torch.equal(x.cpu(), expected.expand(100, 20))
    torch.npu.synchronize()
    # the host's own memory
    assert list((ctypes.c_float * 20).from_address(x.data_ptr())) == [3.0] * 20
    assert torch.equal((x @ x.T).cpu(), expected @ expected.T * 20)


def copied(to, source, count, kind, room=None):
    return acl.aclrtMemcpy(to, size(room or count), source, size(count), kind)


def test_copies_within_bounds_only():
    here, host = (
        torch.zeros(16, dtype=torch.uint8, device="npu"),
        torch.arange(16, dtype=torch.uint8),
    )
    # the direction by the addresses
    check(copied(address_of(here), ctypes.c_void_p(host.data_ptr()), 16, 4))
    assert torch.equal(here.cpu(), host)
    check(copied(ctypes.c_void_p(host.data_ptr()), address_of(here[8:]), 8, 4))
    assert host.tolist() == [*range(8, 16)] * 2
    assert "copying 16 bytes into 8" in refused(
        copied(address_of(here), ctypes.c_void_p(host.data_ptr()), 16, 1, 8)
    )
    assert "are allocated" in refused(copied(address_of(here), address_of(here), 1 << 30, 3))
    assert "copy kind is 9" in refused(copied(address_of(here), address_of(here), 1, 9))
    assert "device memory where host memory" in refused(
        copied(address_of(here), address_of(here), 1, 0)
    )


def test_freed_memory_is_refused():
    address = ctypes.c_void_p()
    check(acl.aclrtMalloc(ctypes.byref(address), size(5000), 0))
    check(acl.aclrtMemset(address, size(5000), 1, size(5000)))
    assert "where 8192 are allocated" in refused(
        acl.aclrtMemset(address, size(9000), 1, size(9000))
    )
    check(acl.aclrtFree(address))
    assert "where 0 are allocated" in refused(acl.aclrtMemset(address, size(1), 1, size(1)))
    assert "not an allocation" in refused(acl.aclrtFree(address))
    assert "out of memory" in refused(
        acl.aclrtMalloc(ctypes.byref(address), size(2**64 - 1), 0), 207001
    )


@pytest.mark.parametrize("waiting", [True, False])
def test_batches_of_copies(waiting):
    host = [torch.full((100,), i, dtype=torch.int32, pin_memory=True) for i in range(4)]
    here = [torch.full((100,), -1 - i, dtype=torch.int32, device="npu") for i in range(4)]
    torch.npu.synchronize()
    # Two up, then two down.
    to = (ctypes.c_void_p * 4)(*(t.data_ptr() for t in [*here[:2], *host[2:]]))
    source = (ctypes.c_void_p * 4)(*(t.data_ptr() for t in [*host[:2], *here[2:]]))
    bytes_ = (ctypes.c_size_t * 4)(*[400] * 4)
    kinds = (Batch * 2)(
        Batch(to=(0, DEVICE), source=(0, HOST)), Batch(to=(0, HOST), source=(0, DEVICE))
    )
    failed = ctypes.c_size_t()

    def call(starts, count=4, kinds=kinds):
        arguments = (
            to,
            bytes_,
            source,
            bytes_,
            size(count),
            kinds,
            (ctypes.c_size_t * 2)(*starts),
            size(2),
            ctypes.byref(failed),
        )
        if waiting:
            return acl.aclrtMemcpyBatch(*arguments)
        return acl.aclrtMemcpyBatchAsync(
            *arguments, ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        )

    assert "from copy 0" in refused(call((1, 2)))
    assert failed.value == 2**64 - 1
    assert "copy 2" in refused(
        call((0, 2), kinds=(Batch * 2)(kinds[0], Batch(to=(0, HOST), source=(0, HOST))))
    )
    assert failed.value == 2
    check(call((0, 2)))
    torch.npu.synchronize()
    assert [t.unique().tolist() for t in here] == [[0], [1], [-3], [-4]]
    assert [t.unique().tolist() for t in host] == [[0], [1], [-3], [-4]]


def test_use_by_component():
    class Usage(ctypes.Structure):
        _fields_ = (
            ("name", ctypes.c_char * 32),
            ("now", ctypes.c_uint64),
            ("most", ctypes.c_uint64),
            ("reserved", ctypes.c_size_t * 8),
        )

    used, count = (Usage * 4)(), ctypes.c_size_t()
    check(acl.aclrtGetMemUsageInfo(0, used, size(4), ctypes.byref(count)))
    free, total = torch.npu.mem_get_info()
    assert (count.value, used[0].now) == (1, total - free)
    assert used[0].most >= used[0].now


def test_pools_statistics_and_snapshots():
    pool = torch.npu.MemPool()
    with torch.npu.use_mem_pool(pool):
        x = torch.ones(3 * MIB, device="npu")
    segments = [
        s for s in torch.npu.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool.id)
    ]
    assert sum(s["total_size"] for s in segments) >= 12 * MIB
    assert any(s["address"] <= x.data_ptr() < s["address"] + s["total_size"] for s in segments)
    statistics = torch.npu.memory_stats()
    assert statistics["allocated_bytes.all.current"] == torch.npu.memory_allocated() >= 12 * MIB
    assert (
        statistics["reserved_bytes.all.peak"]
        == torch.npu.max_memory_reserved()
        >= torch.npu.memory_reserved()
    )
    del x, pool
    torch.npu.empty_cache()


def test_a_process_can_be_held_to_a_fraction():
    torch.npu.empty_cache()
    total = torch.npu.mem_get_info()[1]
    torch.npu.set_per_process_memory_fraction(0.25)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 2, dtype=torch.uint8, device="npu")
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)
    torch.empty(total // 2, dtype=torch.uint8, device="npu")
    torch.npu.empty_cache()


ALLOCATOR = r"""
#include <stddef.h>
#include <sys/types.h>
int aclrtMalloc(void**, size_t, int);
int aclrtFree(void*);
static long long balance, calls;
void* my_malloc(ssize_t size, int device, void* stream) {
  void* memory = 0;
  if (aclrtMalloc(&memory, size, 0)) return 0;
  balance += size, ++calls;
  return memory;
}
void my_free(void* memory, ssize_t size, int device, void* stream) {
  balance -= size;
  aclrtFree(memory);
}
long long my_balance(void) { return balance; }
long long my_calls(void) { return calls; }
"""
PLUGGED = """
import ctypes, sys
import torch, torch_npu
allocator = torch.npu.memory.NPUPluggableAllocator(sys.argv[1], "my_malloc", "my_free")
torch.npu.memory.change_current_allocator(allocator)
mine = ctypes.CDLL(sys.argv[1])
mine.my_balance.restype = ctypes.c_longlong
x = torch.arange(1000.0, device="npu")
doubled = x * 2
y = doubled.sum()
assert y.item() == 999000
held = mine.my_balance()
assert held >= 4000, held
torch.npu.synchronize()  # this allocator frees at once
del x, y, doubled
assert mine.my_balance() < held
print("calls", mine.my_calls())
"""


def test_an_allocator_can_be_plugged_in(run, tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    source, library, script = (
        tmp_path / name for name in ("allocator.c", "allocator.so", "script.py")
    )
    source.write_text(ALLOCATOR)
    script.write_text(PLUGGED)
    libraries = build.library_dir()
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-o",
        library,
        source,
        "-Wl,--no-as-needed,--allow-shlib-undefined",
    ]
    command += [f"-L{libraries}", "-lascendcl"]
    subprocess.run(list(map(str, command)), check=True)
    done = run("run", "--", sys.executable, str(script), str(library))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("calls ")[1]) >= 2


LEAKING = """
import ctypes
import torch, torch_npu
x = torch.ones(3 << 20, device="npu")
print(x.sum().item())
if {leak}:
    address = ctypes.c_void_p()
    for size in 4096, 8192, 8192:
        assert ctypes.CDLL("libascend_emulator.so").aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(size), 0) == 0
del x
torch.npu.empty_cache()
"""


@pytest.mark.parametrize("leak", [True, False])
def test_leaks_are_reported_at_exit(run, leak):
    done = run(
        "run",
        "--npus",
        "2",
        "--",
        sys.executable,
        "-c",
        LEAKING.format(leak=leak),
        ASCEND_EMULATOR_LEAKS="1",
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"ascend-emulator: NPU \d.*", done.stderr)
    expected = [
        "ascend-emulator: NPU 0: 3 allocations of 20480 bytes were never freed: 2 x 8192, 1 x 4096"
    ]
    assert [line for line in lines if "8192" in line] == expected * leak


POISONED = """
import torch, torch_npu
new = [torch.empty(1000, dtype=dtype, device="npu") for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)]
for x in new:
    assert x.isnan().all().item(), x.dtype
x = torch.ones(1000, device="npu")
del x
torch.npu.synchronize()
assert torch.zeros(1000, device="npu").sum().item() == 0
print("poisoned")
"""


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_new_memory_is_poisoned(run, settings):
    variables = {
        "ASCEND_EMULATOR_POISON": "1",
        "PYTORCH_NPU_ALLOC_CONF": settings,
        "PYTORCH_NO_NPU_MEMORY_CACHING": "" if settings else "1",
    }
    done = run("run", "--memory", "256MiB", "--", sys.executable, "-c", POISONED, **variables)
    assert "poisoned" in done.stdout, done.stderr
