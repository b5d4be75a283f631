# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Faults on demand: by API in this process, by option and environment in others."""

import ctypes
import sys
import time

import pytest
import torch
from ascend_emulator import faults
from memory_calls import MIB, acl, check, refused


@pytest.fixture(autouse=True)
def no_faults():
    torch.zeros(1, device="npu")
    torch.npu.empty_cache()
    yield
    faults.clear()


def test_out_of_memory_once_is_survived_and_for_ever_is_not():
    faults.inject("aclrtMalloc", kind="oom")
    assert torch.empty(30 * MIB, device="npu").numel() == 30 * MIB  # torch-npu tries again
    faults.clear()
    torch.npu.empty_cache()
    faults.inject("memory", kind="oom", repeat=True)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(30 * MIB, device="npu")
    faults.clear()
    torch.empty(30 * MIB, device="npu")


def test_only_the_nth_call_fails():
    address = ctypes.c_void_p()

    def allocate():
        return acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(100), 0)

    faults.inject("aclrtMalloc", nth=3, kind="oom")
    for _ in range(2):
        check(allocate())
        check(acl.aclrtFree(address))
    assert "aclrtMalloc: out of memory (injected: aclrtMalloc@3=oom)" in refused(allocate(), 207001)
    check(allocate())
    faults.inject("aclrtFree", nth=1, kind="error=507899")
    assert "error 507899" in refused(acl.aclrtFree(address), 507899)
    check(acl.aclrtFree(address))


def test_a_device_error_arrives_in_python():
    faults.inject("aclrtSynchronizeDeviceWithTimeout", kind="ecc")
    with pytest.raises(RuntimeError, match="HBM MULTI BIT ECC ERROR"):
        torch.npu.synchronize()
    held = torch.ones(30 * MIB, device="npu")
    faults.inject("aclrtSynchronizeDeviceWithTimeout", kind="uce")
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        torch.npu.synchronize()
    assert held.sum().item() == 30 * MIB


@pytest.mark.parametrize(
    ("name", "nth", "kind", "complaint"),
    [
        ("aclrtMaloc", 1, "oom", "aclrtMaloc is no entry point.*did you mean aclrtMalloc?"),
        ("collectiv", 1, "drop", "did you mean collective?"),
        ("aclnnDequantBias", 1, "oom", "aclnnDequantBias is not emulated, and fails by itself"),
        ("aclrtMalloc", 1, "fire", "invalid fault"),
        ("aclrtMalloc", 0, "oom", "invalid fault"),
        ("aclrtMalloc", 1, "hang", "can hang"),
        ("aclrtMalloc", 1, "drop", "only a collective can drop"),
        ("aclnnMatmul", 1, "timeout", "only a collective can timeout"),
        ("stream", 1, "oom", "can do nothing else"),
        ("aclrtMalloc", 1, "error=", "invalid fault"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(name, nth, kind, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        faults.inject(name, nth, kind)
    assert "\n" not in str(error.value)


def test_bad_options_are_refused_in_one_line(run):
    done = run("run", "--fault", "aclrtMalloc=oom", "--", sys.executable, "-c", "1")
    assert done.returncode == 2
    assert "run: argument --fault: invalid fault 'aclrtMalloc=oom'" in done.stderr
    done = run("run", "--fault", "aclrtMaloc@1=oom", "--", "true")
    assert done.returncode == 2
    assert done.stderr == (
        "ascend-emulator run: the fault 'aclrtMaloc@1=oom': aclrtMaloc is no entry point, nor one"
        " of stream, collective, memory; did you mean aclrtMalloc?; `ascend-emulator coverage`"
        " lists them (ASCEND_EMULATOR_FAULTS)\n"
    )


MATMUL = """
import torch, torch_npu
x = torch.eye(4, device="npu")
for i in range(5):
    try:
        y = x @ x
        torch.npu.synchronize()
        print("result", i)
    except RuntimeError as error:
        print("failed", i, "injected: aclnnMm@3=ecc" in str(error) or "ECC" in str(error))
        break
"""


def test_an_operator_fails_at_its_nth_call(run):
    done = run(
        "run",
        "--fault",
        "aclnnMm@3=ecc",
        "--fault",
        "aclnnMatmul@3=ecc",
        "--",
        sys.executable,
        "-c",
        MATMUL,
    )
    assert done.stdout.split("\n")[:3] == ["result 0", "result 1", "failed 2 True"], (
        done.stdout + done.stderr
    )


HANGING = """
import time
import torch, torch_npu
x = torch.ones(4, device="npu")
torch.npu.synchronize()
from ascend_emulator import faults
faults.inject({name!r}, kind="hang")
y = x + 1
started = time.monotonic()
try:
    torch.npu.synchronize()
except RuntimeError as error:
    print("timed out", time.monotonic() - started < 20)
"""


@pytest.mark.parametrize("name", ["stream", "aclnnAdds"])
def test_a_hanging_task_ends_in_the_timeout(run, name):
    started = time.monotonic()
    done = run(
        "run",
        "--",
        sys.executable,
        "-c",
        HANGING.format(name=name),
        ACL_STREAM_TIMEOUT="1500",
        ACL_DEVICE_SYNC_TIMEOUT="2",
    )
    assert "timed out True" in done.stdout, done.stdout + done.stderr
    assert time.monotonic() - started < 60
