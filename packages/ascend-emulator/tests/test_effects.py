# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""No silent stubs: every exported name is classified, one that refuses fails, and one that succeeds
has done what it declares."""

import ctypes
import subprocess
import sys
import textwrap
from ctypes import byref, c_char, c_char_p, c_int64, c_size_t, c_uint64, c_void_p

import pytest
import torch
from ascend_emulator import build, cann_names, coverage

FILLS = (0x5A, 0xA5)
BOUNDED_TEXT = {"snprintf_s", "strcpy_s", "vsnprintf_s"}
"""Functions of libc_sec.so on text of the host, which torchair's libraries call; they are no entry
points of CANN."""


@pytest.fixture(scope="module")
def points():
    return {point.name: point for point in coverage.entry_points()}


@pytest.fixture(scope="module")
def library():
    torch.npu.current_device()
    return ctypes.CDLL("libascendcl.so")


def test_every_exported_name_is_classified(points):
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", build.library_dir() / f"lib{build.CORE}.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = {cann_names.operator(line.split()[-1]) for line in listing.splitlines()}
    cann = {
        name for name in exported if not name.startswith(("_", "ascend_emulator_"))
    }  # Of C++, of the linker, and of the emulator itself.
    assert len(cann) > 1000
    assert cann - BOUNDED_TEXT == {name for name in points if "::" not in name}


def test_every_operator_of_atb_is_exported(points):
    """Under its mangled name, that libop_plugin_atb.so links against."""
    exported = (build.library_dir() / f"lib{build.CORE}.so").read_bytes()
    operators = [name.removeprefix("atb::") for name in points if name.startswith("atb::")]
    assert operators == [name.removeprefix("atb::") for name in cann_names.atb_operators()]
    assert len(operators) == 8
    for name in operators:
        assert (
            f"\0_ZN3atb15CreateOperationINS_5infer{len(name) + 5}{name}ParamEEEi".encode()
            in exported
        )


def test_every_effect_is_one_of_five(points):
    assert {point.effect for point in points.values()} == {
        "computed",
        "answers",
        "keeps",
        "nothing",
        "refuses",
    }
    assert {bool(point.why) for point in points.values() if point.effect == "nothing"} == {True}
    assert {bool(point.why) for point in points.values() if point.effect != "nothing"} == {False}


REFUSE = """
    import ctypes, sys
    import torch
    library = ctypes.CDLL("libascendcl.so")
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    for name in sys.stdin.read().split():
        call = getattr(library, name)
        call.restype = ctypes.c_int64 if name in sys.argv[1:] else ctypes.c_int32
        status, said = call(), (library.aclGetRecentErrMsg() or b"").decode()
        if bool(status) == (name in sys.argv[1:]) or name.removesuffix("GetWorkspaceSize") not in said:
            print(name, status, said)
"""


def test_what_is_not_emulated_fails_by_its_name(points):
    """One with a pointer for its result gives none."""
    names = [name for name, point in points.items() if point.effect == "refuses"]
    names += [
        f"{name}GetWorkspaceSize"
        for name in names
        if cann_names.has_two_functions(name) and not name.endswith("GetMaxWorkspaceSize")
    ]
    without_status = cann_names.NO_STATUS | {
        name for name, status in cann_names.public_names().items() if not status
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REFUSE), *without_status],
        input=" ".join(names),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


class Out:
    """Memory for an output of this number of bytes, of which the call writes the first (all by
    default)."""

    def __init__(self, size, written=None):
        self.size, self.written = size, size if written is None else written


# handles, made when the test runs
TENSOR, STREAM, GRAPH, DESC = "tensor", "stream", "graph", "desc"
# Calls and their arguments; the outputs have to be written in all of their bytes.
ANSWERS = {
    "aclGetCannAttribute": (1, Out(4)),
    "aclGetCannAttributeList": (Out(8), Out(8)),
    "aclGetCompileopt": (1, Out(16, 8), c_size_t(16)),
    "aclGetDeviceCapability": (0, 0, Out(8)),
    "aclGetTensorDescDimV2": (DESC, c_size_t(1), Out(8)),
    "aclGetViewShape": (TENSOR, Out(8), Out(8)),
    "aclmdlRIGetId": (GRAPH, Out(4)),
    "aclnnNpuFormatCastCalculateSizeAndFormat": (TENSOR, 2, -1, Out(8), Out(8), Out(4)),
    "aclrtDeviceGetBareTgid": (Out(4),),
    "aclrtDeviceGetUuid": (0, Out(16)),
    "aclrtDevicePeerAccessStatus": (0, 0, Out(4)),
    "aclrtGetCurrentContext": (Out(8),),
    "aclrtGetDevice": (Out(4),),
    "aclrtGetDeviceCount": (Out(4),),
    "aclrtGetDeviceInfo": (0, 101, Out(8)),
    "aclrtGetDeviceResLimit": (0, 1, Out(4)),
    "aclrtGetDeviceUtilizationRate": (0, Out(16)),
    "aclrtGetErrorVerbose": (0, Out(2576)),
    "aclrtGetLogicDevIdByUserDevId": (0, Out(4)),
    "aclrtGetMemInfo": (0, Out(8), Out(8)),
    "aclrtGetMemUceInfo": (0, Out(256, 0), c_size_t(1), Out(8)),
    "aclrtGetMemUsageInfo": (0, Out(256, 8), c_size_t(1), Out(8)),
    "aclrtGetPrimaryCtxState": (0, Out(4), Out(4)),
    "aclrtGetResInCurrentThread": (0, Out(4)),
    "aclrtGetRunMode": (Out(4),),
    "aclrtMemGetAllocationGranularity": (b" " * 64, 0, Out(8)),
    "aclrtGetStreamOverflowSwitch": (STREAM, Out(4)),
    "aclrtGetStreamResLimit": (STREAM, 0, Out(4)),
    "aclrtGetSysParamOpt": (0, Out(8)),
    "aclrtSetOpExecuteTimeOutV2": (c_uint64(5000), Out(8)),
    "aclrtStreamGetId": (STREAM, Out(4)),
    "aclsysGetCANNVersion": (0, Out(1024, 512)),
    "aclsysGetVersionStr": (b"", Out(128, 4)),
    "drvGetDevNum": (Out(4),),
}
# Those whose result is the answer.
VALUES = {
    "aclGetCompileoptSize": (c_size_t, (1,), 8),
    "aclGetTensorDescFormat": (ctypes.c_int32, (DESC,), 2),
    "aclGetTensorDescNumDims": (c_size_t, (DESC,), 2),
    "aclGetTensorDescType": (ctypes.c_int32, (DESC,), 1),
    "aclrtGetLastError": (ctypes.c_int32, (0,), 0),
    "aclrtGetSocName": (c_char_p, (), b"Ascend910B1"),
    "aclrtPeekAtLastError": (ctypes.c_int32, (0,), 0),
    "HcclGetCommConfigCapability": (ctypes.c_uint32, (), 12),
    "HcclGetErrorString": (c_char_p, (0,), b"no error"),
    "aclGetRecentErrMsg": (c_char_p, (), None),
}


@pytest.fixture(scope="module")
def handles(library):
    dims, graph = (c_int64 * 2)(3, 5), torch.npu.NPUGraph()
    held = torch.zeros(3, 5, dtype=torch.float16, device="npu")
    side = torch.npu.Stream()
    library.aclCreateTensor.restype = library.aclCreateTensorDesc.restype = c_void_p
    strides = (c_int64 * 2)(5, 1)
    tensor = library.aclCreateTensor(
        dims, c_uint64(2), 1, strides, c_int64(0), 2, dims, c_uint64(2), c_void_p(held.data_ptr())
    )
    desc = library.aclCreateTensorDesc(1, 2, dims, 2)
    model = c_void_p()
    with torch.npu.stream(side):
        stream = c_void_p(side.npu_stream)
        assert library.aclmdlRICaptureBegin(stream, 2) == 0
        assert library.aclmdlRICaptureEnd(stream, byref(model)) == 0
    yield {TENSOR: c_void_p(tensor), DESC: c_void_p(desc), STREAM: stream, GRAPH: model}
    library.aclDestroyTensorDesc.restype = None
    library.aclDestroyTensorDesc(c_void_p(desc))
    assert library.aclDestroyTensor(c_void_p(tensor)) == 0
    assert library.aclmdlRIDestroy(model) == 0
    del graph, held


def test_all_answers_are_looked_at(points):
    elsewhere = {"aclrtDeviceCanAccessPeer"}  # of two NPUs: test_runtime_calls.py
    answers = {name for name, point in points.items() if point.effect == "answers"}
    assert ANSWERS.keys() | VALUES.keys() | elsewhere == answers


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_written(library, handles, name):
    """Over two patterns, so that no value is taken for what was there before."""
    seen = []
    for fill in FILLS:
        rooms, arguments = [], []
        for argument in ANSWERS[name]:
            if isinstance(argument, Out):
                rooms.append(
                    (c_char * argument.size).from_buffer_copy(bytes([fill]) * argument.size)
                )
                arguments.append(rooms[-1])
            else:
                arguments.append(
                    handles.get(argument, argument) if isinstance(argument, str) else argument
                )
        assert getattr(library, name)(*arguments) == 0
        seen.append([room.raw for room in rooms])
    outs = [argument for argument in ANSWERS[name] if isinstance(argument, Out)]
    for out, first, second in zip(outs, *seen, strict=True):
        untouched = [
            place for place in range(out.written) if (first[place], second[place]) == FILLS
        ]
        assert not untouched


@pytest.mark.parametrize("name", VALUES)
def test_an_answer_is_the_result(library, handles, name):
    kind, arguments, expected = VALUES[name]
    call = getattr(library, name)
    library.aclGetRecentErrMsg()  # clears it
    library.aclrtGetLastError(0)
    call.restype = kind
    assert call(*(handles.get(argument, argument) for argument in arguments)) == expected


def test_what_is_kept_is_told(library):
    value = c_int64()
    for setter in ("aclrtSetSysParamOpt", "aclrtCtxSetSysParamOpt"):
        for level in (1, 0):
            assert getattr(library, setter)(7, c_int64(level)) == 0
            assert library.aclrtGetSysParamOpt(7, byref(value)) == 0
            assert value.value == level


def test_a_context_is_its_npu(run):
    """In a program with two."""
    script = """
        import ctypes
        import torch
        library, context, here = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p(), ctypes.c_int32()
        torch.npu.set_device(0)
        assert library.aclrtGetCurrentContext(ctypes.byref(context)) == 0
        for call, argument, npu in ((library.aclrtSetDevice, 1, 1), (library.aclrtSetCurrentContext, context, 0)):
            assert call(argument) == 0
            assert library.aclrtGetDevice(ctypes.byref(here)) == 0
            assert here.value == npu
    """
    done = run("run", "--npus", "2", "--", sys.executable, "-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
