# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Launches of compiled kernels of Triton, without Triton: the kernels are those of
triton_entry.cpp."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_npu
from ascend_emulator import build, triton

SOURCE = Path(__file__).with_name("triton_entry.cpp")


class Pointer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("storage", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("slot", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    library = tmp_path_factory.mktemp("triton") / "kernels.so"
    libraries = (f"-L{build.library_dir()}", f"-l{build.CORE}")
    command = [*build.cxx()[0], "-shared", "-fPIC", SOURCE, "-o", library, *libraries]
    subprocess.run(list(map(str, command)), check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def emulator():
    library = ctypes.CDLL("libascend_emulator.so")
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return library


def launch(emulator, kernel, tensor, *grid, number=0, size=None, dtype=b"fp32", unbounded=0):
    address, storage = tensor.data_ptr(), tensor.untyped_storage()
    bytes_ = storage.nbytes() if size is None else size
    pointer = Pointer(b"x", dtype, storage.data_ptr(), bytes_, 0)
    slots = (ctypes.c_uint64 * 9)(address, address, number, *grid, 0, 0, 0)
    stream = ctypes.c_void_p(torch_npu._C._npu_getCurrentRawStream(0))
    entry = ctypes.cast(kernel, ctypes.c_void_p)
    arguments = (entry, slots, 9, ctypes.byref(pointer), 1, unbounded, stream)
    if emulator.ascend_emulator_triton_launch(b"kernel", *arguments):
        raise RuntimeError(emulator.aclGetRecentErrMsg().decode())


def test_programs_of_a_grid(emulator, kernels):
    x = torch.arange(10.0).npu() * 1
    launch(emulator, kernels.twice, x, 8, 1, 1)
    assert x.cpu().tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 8, 9]
    launch(emulator, kernels.twice, x, 0, 1, 1)
    launch(emulator, kernels.twice, x[8:], 2, 3, 1)
    assert x.cpu().tolist()[8:] == [64, 72]


def test_copy_to_an_address_in_memory(emulator, kernels):
    x, out = torch.arange(6.0).npu(), torch.zeros(6).npu()
    launch(emulator, kernels.transpose, x, 1, 1, 1, number=out.data_ptr())
    assert out.cpu().tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (256, 256, 1)}, "a grid of 256 x 256 x 1 programs; supported: at most 65535"),
        ({"dtype": b"fp8e4nv"}, "x has the dtype fp8e4nv, which Ascend910B1 does not compute"),
        ({"tensor": torch.zeros(8)}, "which is no memory of an NPU"),
    ],
    ids=["grid", "dtype", "memory"],
)
def test_launch_that_breaks_a_rule(emulator, kernels, request, options, message):
    x, grid = options.pop("tensor", torch.zeros(8).npu()), options.pop("grid", (8, 1, 1))
    with pytest.raises(RuntimeError, match=message) as refused:
        launch(emulator, kernels.twice, x, *grid, **options)
    rule = request.node.callspec.id
    assert "kernel: " in str(refused.value)
    assert f"(rule triton.{rule}, " in str(refused.value)


PROGRAM = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import torch, torch_npu
import test_triton_launch as launches
kernels, emulator = ctypes.CDLL(sys.argv[2]), ctypes.CDLL("libascend_emulator.so")
x = torch.zeros(8, device="npu")
launches.launch(emulator, kernels.{kernel}, x, 9, 1, 1, number={number}{options})
torch.npu.synchronize()
print("computed", x.cpu().tolist())
"""
BOUNDS = "kernel: reads 4 bytes at 0x"


@pytest.mark.parametrize(
    ("options", "flags", "message"),
    [
        (
            {},
            (),
            "line 7, in program (8, 0, 0), outside of its tensors: 0 bytes after the end of x",
        ),
        ({"size": 0}, (), "computed"),
        ({}, ("--allow", "triton.bounds"), "computed"),
        ({"kernel": "transpose"}, (), "follows the address 0, where the NPU has no memory"),
    ],
    ids=["refused", "address", "allowed", "followed"],
)
def test_access_outside_of_the_tensors(kernels, options, flags, message):
    values = {"kernel": "twice", "number": 0} | options
    given = f", size={options['size']}" if "size" in options else ""
    text = PROGRAM.format(kernel=values["kernel"], number=values["number"], options=given)
    run = (sys.executable, "-m", "ascend_emulator.cli", "run", "--memory", "256MiB", *flags, "--")
    arguments = (str(SOURCE.parent), kernels._name)
    done = subprocess.run(
        [*run, sys.executable, "-c", text, *arguments], capture_output=True, text=True
    )
    assert message in done.stdout + done.stderr


def test_nothing_is_installed_without_the_extra(monkeypatch):
    monkeypatch.setattr(triton, "PASSES", "no_such_package")
    before = list(sys.meta_path)
    triton.install()
    assert sys.meta_path == before
