# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Processes that are forked from one with NPUs: before it uses them, after, and while its streams
run."""

import sys

PARENT = """
import ctypes, os, sys, time
import torch, torch_npu

def child(body):
    time.sleep(0.05)  # torch_npu's queue thread, which may hold its own locks, comes to rest; the streams go on
    pid = os.fork()
    if pid == 0:
        body()
        sys.stdout.flush()
        sys.exit(0)  # as a program ends, with the clean-up of torch_npu and of the emulator
    used, since = 0, time.monotonic()
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        before, used = used, open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[11:13]  # its CPU time
        if used != before:
            since = time.monotonic()
        if time.monotonic() - since > 60:
            os.kill(pid, 9)
            sys.exit("the child hangs")
        time.sleep(0.01)
"""


def output(run, script):
    done = run("run", "--npus", "2", "--", sys.executable, "-c", PARENT + script)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_forked_child_may_use_npus_that_its_parent_did_not_use(run):
    script = """
assert torch.npu.is_available() and torch.npu.device_count() == 2
child(lambda: print(torch.ones(3, device="npu:1").sum().item()))
print(torch.ones(4, device="npu").sum().item())
"""
    assert output(run, script) == ["3.0", "4.0"]


def test_counting_npus_reserves_no_memory_of_theirs(run):
    """So a child may have other NPUs: imports of transformers count them."""
    script = """
assert torch.npu.is_available() and torch.npu.device_count() == 2
os.environ["ASCEND_EMULATOR_MEMORY"] = str(96 << 20)
child(lambda: print(torch.npu.mem_get_info(1)[1] >> 20))
"""
    assert output(run, script) == ["96"]


def test_address_space_may_be_reserved_first(run):
    script = """
runtime, at = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p()
assert torch.npu.device_count() == 2
print(runtime.aclrtReserveMemAddress(ctypes.byref(at), ctypes.c_size_t(2 << 20), ctypes.c_size_t(0), None, ctypes.c_uint64(0)))
"""
    assert output(run, script) == ["0"]


def test_calls_of_a_forked_process_are_refused_by_name(run):
    script = """
x = torch.ones(4, device="npu")
torch.npu.synchronize()

def use():
    runtime = ctypes.CDLL("libascendcl.so")
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    at = ctypes.c_void_p()
    print(runtime.aclrtMalloc(ctypes.byref(at), ctypes.c_size_t(64), 0), runtime.aclGetRecentErrMsg().decode())
    try:
        torch.ones(4, device="npu")
    except RuntimeError as error:
        print("this process was forked from one that uses NPUs" in str(error) or error)

child(use)
print((x + 1).sum().item())
"""
    assert output(run, script) == [
        (
            "107002 [ascend-emulator] aclrtMalloc: this process was forked from one that uses NPUs,"
            " and cannot use them; start it with the method spawn (CANN refuses, inferred)"
        ),
        "True",
        "8.0",
    ]


def test_forked_child_without_npus_exits_while_streams_run(run):
    script = """
x = torch.full((512, 512), 1e-3, device="npu")
streams = [torch.npu.Stream() for _ in range(4)]
for turn in range(5):
    for stream in streams:
        with torch.npu.stream(stream):
            for _ in range(20):
                y = x @ x
    [stream.npu_stream for stream in streams]  # empties torch_npu's queue, not the streams
    child(lambda: print("ended", flush=True))
torch.npu.synchronize()
print(torch.isfinite(y).all().item())
"""
    assert output(run, script) == ["ended"] * 5 + ["True"]


def test_data_loader_forks_workers_of_a_process_that_uses_npus(run):
    script = """
from torch.utils.data import DataLoader
x = torch.ones(4, device="npu")
loader = DataLoader(list(range(8)), batch_size=2, num_workers=2, multiprocessing_context="fork")
print([(batch.npu() + x[:2].long()).tolist() for batch in loader])
"""
    assert output(run, script) == ["[[1, 2], [3, 4], [5, 6], [7, 8]]"]


def test_children_get_no_copy_of_device_memory(run):
    script = """
x = torch.full((64 << 20,), 1.0, device="npu")
torch.npu.synchronize()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

own = resident()
child(lambda: print(own - resident() >= 256))
"""
    assert output(run, script) == ["True"]
