# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""All of CANN's public functions: each answers, or refuses by its own name, whoever calls it."""

import json
import sys
import textwrap

import pytest
from ascend_emulator import cann_names, coverage

# Calls each name with null pointers and zeros, in a process of its own. Those that return a value
# print their refusal.
CALL_ALL = """
import ctypes, json, os, sys
from ascend_emulator import build
for name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(str(build.torch_dir() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
library = ctypes.CDLL("libascend_emulator.so")
library.aclGetRecentErrMsg.restype = ctypes.c_char_p
nothing = [ctypes.c_void_p(0)] * 64
for name in json.load(sys.stdin):
    print(name, end=" ", flush=True)
    if not hasattr(library, name):
        print("missing", flush=True)
        continue
    library.aclGetRecentErrMsg()
    status = getattr(library, name)(*nothing)
    said = (library.aclGetRecentErrMsg() or b"").decode().replace(chr(10), " ") if name != "aclGetRecentErrMsg" else ""
    print(status, said, flush=True)
"""
# Their own message is about something else: the last error's code, and a graph operator.
CODES = {"aclrtGetLastError", "aclrtPeekAtLastError", "aclopCompileAndExecuteV2"}


def functions(name):
    """The C functions of a name: an operator has two."""
    return (f"{name}GetWorkspaceSize", name) if cann_names.has_two_functions(name) else (name,)


@pytest.fixture(scope="module")
def null_calls(run, tmp_path_factory):
    """C function to (status, message) when it is called with nothing."""
    names = [
        name
        for point in coverage.entry_points()
        if "::" not in point.name
        for name in functions(point.name)
    ]
    names = [name for name in names if "CalculateSizeAndFormat" not in name]
    script = tmp_path_factory.mktemp("names") / "call_all.py"
    script.write_text(textwrap.dedent(CALL_ALL).replace("json.load(sys.stdin)", repr(names)))
    done = run("run", "--", sys.executable, str(script), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1][0]} with nothing: {done.stderr[-300:]}"
    return {name: (status, *message) for name, status, *message in lines}


def test_every_public_name_of_cann_is_there(null_calls):
    """In the headers of torch_npu 2.7 to 2.14, in op-plugin's calls, and in CANN's API
    reference."""
    public = [name for name in cann_names.public_names() if "CalculateSizeAndFormat" not in name]
    assert len(public) > 1900
    assert {name for each in public for name in functions(each)} <= null_calls.keys()
    assert not [name for name, (status, *_) in null_calls.items() if status == "missing"]


def test_versions_that_only_the_api_reference_has_are_there():
    """Those that MindSpeed calls."""
    fused = [
        f"{name}MatmulAllReduceAddRmsNorm"
        for name in ("", "Inplace", "Quant", "InplaceQuant", "WeightQuant", "InplaceWeightQuant")
    ]
    names = (
        *(
            "RingAttentionUpdate",
            "GroupedMatmulV2",
            "FFNV3",
            "GroupedMatMulAllReduce",
            "BatchMatMulReduceScatterAlltoAll",
        ),
        *("AlltoAllAllGatherBatchMatMul", "ApplyFusedEmaAdam"),
    )
    assert {f"aclnn{name}" for name in (*fused, *names)} <= cann_names.public_names().keys()


def test_what_is_not_emulated_refuses_by_its_own_name(null_calls):
    refusing = {
        point.name
        for point in coverage.entry_points()
        if point.state == "refuses" and "::" not in point.name
    }
    refusing = {name for name in refusing if "CalculateSizeAndFormat" not in name}
    # by the graph operator's name
    for name in ("aclopCompileAndExecute", "aclopCompileAndExecuteV2"):
        assert "'(null)' (aclopCompileAndExecute) is not emulated" in " ".join(null_calls[name])
    assert len(refusing) > 800
    wrong = {
        function: null_calls[function]
        for name in refusing
        for function in functions(name)
        if not any(
            f"[ascend-emulator] {name} is not {what}" in " ".join(null_calls[function])
            for what in ("emulated", "an operator of Ascend910B1, by torch_npu's documentation")
        )
    }
    assert not wrong, json.dumps(wrong, indent=1)


def test_emulated_commands_answer_or_name_what_is_missing(null_calls):
    implemented = {
        point.name
        for point in coverage.entry_points()
        if point.state != "refuses" and "::" not in point.name
    }
    statuses = cann_names.public_names()
    wrong = {}
    for name in implemented - CODES:
        if (
            name in cann_names.NO_STATUS
            or not statuses.get(name, True)
            or "CalculateSizeAndFormat" in name
        ):
            continue
        for function in functions(name):
            status, stderr = (*null_calls[function], "")[:2]
            if status != "0" and stderr and name not in stderr:
                wrong[function] = stderr
    assert not wrong, json.dumps(wrong, indent=1)


def test_an_operator_without_outputs_is_refused(null_calls):
    """ACLNN_ERR_PARAM_NULLPTR, where it crashed."""
    status, stderr = null_calls["aclnnAddGetWorkspaceSize"]
    assert (status, stderr) == (
        "161001",
        "[ascend-emulator] aclnnAdd: workspaceSize or executor is null",
    )
