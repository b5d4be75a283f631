# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Several NPUs, the choice among them, and the chips."""

import json
import sys

import pytest
from ascend_emulator.activation import most_npus
from ascend_emulator.chips import chips

# torch is imported once. Each query runs in a fork of its own, because a process sees the same
# machine for its lifetime.
FORKS = """
import ctypes, json, os, sys, traceback
import torch
import torch_npu
from ascend_emulator.activation import most_npus, set_environment

def ask(label, question, npus=1, soc="Ascend910B1", memory=1 << 30, **environ):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        set_environment(os.environ, npus, soc, memory)
        os.environ.update(environ)
        try:
            answer = question()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps([label, answer]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
QUESTIONS = (
    FORKS
    + """
from ascend_emulator.chips import chips

def properties():
    known, bf16 = torch.npu.get_device_properties(0), torch.npu.is_bf16_supported()
    return [known.name, known.total_memory, known.L2_cache_size, known.cube_core_num, known.vector_core_num, bf16]

def add(dtype):
    torch_npu.npu.set_compile_mode(jit_compile=False)
    x = torch.ones(3, dtype=dtype).npu()
    return (x + x).float().tolist()

for soc, chip in chips().items():
    ask(soc, properties, soc=soc, memory=chip.memory)
    ask(soc + " bfloat16", lambda: add(torch.bfloat16), soc=soc)
    ask(soc + " float16", lambda: add(torch.float16), soc=soc)

def counts():  # by the driver and by the runtime
    return [torch.npu.device_count(), torch_npu._C._npu_getDeviceCount()]

for visible in ("0,2", "2", "1,9,0", "", "x", "0, 1", "0 ,1", "1,0", "0,1,1", "npu0", "0,", ",0"):
    ask("visible " + visible, counts, npus=3, ASCEND_RT_VISIBLE_DEVICES=visible)
ask("last", lambda: str(torch.ones(1, device=f"npu:{most_npus() - 1}").device), npus=most_npus())

def placed():
    torch.manual_seed(0)
    x = torch.randn(200, 300)
    a, b = x.to("npu:0"), x.to("npu:1")
    with torch.npu.device(2):
        here = torch.ones(2, device="npu")
    torch.npu.set_device(1)
    moved = a.to("npu:1")
    back = (moved @ b.t()).to("npu:0", non_blocking=True)
    torch.npu.synchronize("npu:1")
    return {
        "devices": [str(t.device) for t in (a, b, here, moved, back)],
        "current": torch.npu.current_device(),
        "equal": torch.equal(moved.cpu(), x) and torch.allclose(back.cpu(), x @ x.t(), atol=1e-3),
        "apart": len({t.data_ptr() for t in (a, b, moved)}) == 3,
        "uuids": len({str(torch.npu.get_device_properties(i).uuid) for i in range(3)}),
    }

def memory():
    torch.ones(1, device="npu:0"), torch.ones(1, device="npu:1")  # torch_npu asks an NPU only once it is in use
    before = [torch.npu.mem_get_info(i)[0] for i in range(2)]
    x = torch.empty(256 << 20, dtype=torch.uint8, device="npu:1")
    after = [torch.npu.mem_get_info(i)[0] for i in range(2)]
    return [before[i] - after[i] for i in range(2)]

def mixed():
    return (torch.ones(3, device="npu:0") + torch.ones(3, device="npu:1")).tolist()

ask("placed", placed, npus=3)
ask("memory", memory, npus=2)
ask("mixed", mixed, npus=2)
ask("beyond", lambda: torch.ones(3, device="npu:2").tolist(), npus=2)

def hidden():
    counts = [torch.npu.device_count()]
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0"
    counts.append(torch.npu.device_count())
    torch.ones(3, device="npu")
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0,1"
    count = ctypes.c_uint32()
    assert ctypes.CDLL("libascendcl.so").aclrtGetDeviceCount(ctypes.byref(count)) == 0
    return [*counts, count.value]

ask("hidden", hidden, npus=2)

def prepared_for_a_child():  # as vLLM and Ray do
    torch.ones(3, device="npu:1")
    uuids = [str(torch.npu.get_device_properties(i).uuid) for i in range(2)]
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "3"
    uuid, again = ctypes.create_string_buffer(16), []
    for i in range(2):
        assert ctypes.CDLL("libascendcl.so").aclrtDeviceGetUuid(i, uuid) == 0
        again.append(uuid.raw[15])
    return [again, len(set(uuids))]

ask("prepared for a child", prepared_for_a_child, npus=4, ASCEND_RT_VISIBLE_DEVICES="1,2")
"""
)


@pytest.fixture(scope="module")
def answers(run):
    done = run("run", "--", sys.executable, "-c", QUESTIONS)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


@pytest.mark.parametrize("soc", chips())
def test_chip_is_what_its_table_says(answers, soc):
    chip = chips()[soc]
    assert answers[soc] == [
        chip.name,
        chip.memory,
        chip.l2,
        chip.cube_cores,
        chip.vector_cores,
        chip.bfloat16,
    ]
    assert answers[f"{soc} float16"] == [2.0, 2.0, 2.0]


def test_an_npu_keeps_its_number_when_the_variable_changes(answers):
    assert answers["prepared for a child"] == [[1, 2], 2]


@pytest.mark.parametrize("soc", chips())
def test_bfloat16_where_the_chip_has_it(answers, soc):
    if chips()[soc].bfloat16:
        assert answers[f"{soc} bfloat16"] == [2.0, 2.0, 2.0]
    else:
        assert (
            f"aclnnAdd: self is BFloat16 (DT_BFLOAT16); {soc} does not compute in bfloat16; use"
            " float16" in answers[f"{soc} bfloat16"]
        )


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0,2", 2),
        ("2", 1),
        ("1,9,0", 1),
        ("", 0),
        ("x", 0),
        ("0, 1", 1),
        ("0 ,1", 1),
        ("1,0", 0),
        ("0,1,1", 0),
        ("npu0", 0),
        ("0,", 1),
        (",0", 0),
    ],
)
def test_visible_devices(answers, visible, count):
    """ASCEND_RT_VISIBLE_DEVICES names those of three that are seen; the first that is not there
    ends the list."""
    assert answers[f"visible {visible}"] == [count, count]


def test_ray_detects_visible_npus_and_their_chip(run):
    from ray._private.accelerators import npu

    script = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("npu", {npu.__file__!r})
npu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(npu)
manager = npu.NPUAcceleratorManager
print(manager.get_current_node_num_accelerators(), manager.get_current_node_accelerator_type())
"""
    done = run(
        "run",
        "--npus",
        "3",
        "--soc",
        "Ascend910B4",
        "--",
        sys.executable,
        "-c",
        script,
        ASCEND_RT_VISIBLE_DEVICES="1,2",
    )
    assert done.stdout == "2 Ascend910B4\n", done.stderr


def test_the_last_of_the_most_npus_can_be_used(answers):
    """A process with more gets an error of torch_npu at those beyond."""
    assert answers["last"] == f"npu:{most_npus() - 1}"


def test_tensors_on_several_npus(answers):
    placed = answers["placed"]
    assert placed["devices"] == ["npu:0", "npu:1", "npu:2", "npu:1", "npu:0"]
    assert placed["current"] == 1
    assert placed["equal"]
    assert placed["apart"]
    assert placed["uuids"] == 3


def test_each_npu_has_memory_of_its_own(answers):
    first, second = answers["memory"]
    assert first == 0
    # torch_npu allocates in units of 2 MiB, a little more than requested.
    assert 256 << 20 <= second <= 258 << 20


def test_operands_on_different_npus_are_refused(answers):
    """By the emulator: torch_npu passes them on, and on hardware the kernel has no access."""
    assert (
        "aclnnAdd: a tensor that is not in the memory of NPU 0, where the operator runs"
        in answers["mixed"]
    )


def test_an_npu_that_is_not_there(answers):
    assert "device 2 asked for, 2 present; fix: ascend-emulator run --npus 3" in answers["beyond"]


def test_the_visible_npus_may_change_until_one_is_used(answers):
    assert answers["hidden"] == [2, 1, 1]


def test_pyacl_copies_memory(run):
    code = """
import torch, torch_npu
from acl.rt import memcpy
import acl
x = torch.zeros(4, device="npu")
torch.npu.synchronize()  # memcpy is not ordered behind the queue of launches
host = torch.arange(4.0)
print(memcpy(x.data_ptr(), 16, host.data_ptr(), 16, 1), x.tolist(), acl.rt.get_device_count(), acl.get_soc_name())
"""
    done = run("run", "--npus", "2", "--", sys.executable, "-c", code)
    assert done.stdout.strip() == "0 [0.0, 1.0, 2.0, 3.0] (2, 0) Ascend910B1", done.stderr
