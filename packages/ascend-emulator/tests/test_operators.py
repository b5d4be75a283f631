# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Operators of a project's own, in C++ and in Python, called through libcust_opapi.so as
EXEC_NPU_CMD calls them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ascend_emulator import build, operators
from harness.project.distributions import write_metadata

HERE = Path(__file__).parent
CPP, PYTHON = HERE / "operators_of_a_project.cpp", HERE / "operators_of_a_project.py"
# EXEC_NPU_CMD of op_plugin/utils/op_api_common.h in Python: look both functions up, make CANN's
# objects, call, launch.
CALLER = """
import ctypes, torch, torch_npu
from ctypes import byref, c_bool, c_double, c_int64, c_uint64, c_void_p
acl = ctypes.CDLL("libascendcl.so")
own = ctypes.CDLL("libcust_opapi.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 27, torch.int64: 9}
def new(name, *arguments):
    create = getattr(acl, name)
    create.restype = c_void_p
    return c_void_p(create(*arguments))
def array(kind, values, ctype):
    return new(kind, (ctype * len(values))(*values), c_uint64(len(values)))
def tensor(x):
    if x is None:
        return c_void_p(0)
    longs = lambda values: (c_int64 * len(values))(*values)
    stored = longs([x.untyped_storage().nbytes() // x.element_size()])
    place = longs(x.stride()), c_int64(x.storage_offset())
    memory = stored, c_uint64(1), c_void_p(x.untyped_storage().data_ptr())
    return new("aclCreateTensor", longs(x.shape), c_uint64(x.dim()), TYPES[x.dtype], *place, 2, *memory)
def tensors(all):
    handles = [tensor(x).value for x in all]
    return new("aclCreateTensorList", (c_void_p * len(handles))(*handles), c_uint64(len(handles)))
def execute(name, *arguments):
    workspace, executor = c_uint64(), c_void_p()
    status = getattr(own, name + "GetWorkspaceSize")(*arguments, byref(workspace), byref(executor))
    if status == 0:
        stream = c_void_p(torch.npu.current_stream().npu_stream)
        status = getattr(own, name)(c_void_p(0), workspace, executor, stream)
    if status:
        raise RuntimeError(f"{status}: {acl.aclGetRecentErrMsg().decode()}")
def scalar(value):
    return new("aclCreateScalar", byref(ctypes.c_float(value)), 0)
x, y = torch.arange(6.0, device="npu").view(2, 3), torch.ones(2, 3, device="npu")
out = torch.empty_like(x)
"""


@pytest.fixture(scope="module")
def program(run):
    """``program(text)``: its output with the operators of both files."""

    def start(text, declared=f"{CPP}:{PYTHON}", **environment):
        variables = {"ASCEND_EMULATOR_OPERATORS": declared, "TASK_QUEUE_ENABLE": "0", **environment}
        return run("run", "--", sys.executable, "-c", CALLER + textwrap.dedent(text), **variables)

    return start


@pytest.fixture(scope="module")
def outputs(program):
    done = program("""
        none = lambda: array("aclCreateIntArray", [], c_int64)
        execute("aclnnAddCustom", tensor(x), tensor(y), scalar(2.5), none(), tensor(out))
        print(out.tolist())
        transposed = x.t()  # strides are kept
        small = torch.empty(3, 2, device="npu")
        execute("aclnnAddCustom", tensor(transposed), tensor(y.t()), scalar(1), none(), tensor(small))
        print(small.tolist())
        factors = array("aclCreateFloatArray", [1.0, 2.0, 0.5], ctypes.c_float)
        values = factors, c_int64(7), c_double(0.25), c_bool(True)
        call = lambda bias: execute("aclnnScaleCustom", tensor(x), tensor(bias), *values, tensor(out))
        call(None)
        torch.npu.empty_cache()  # waits for the device and keeps the interpreter's lock
        print(out.tolist())
        both = torch.empty(4, 3, device="npu")
        execute("aclnnConcatCustom", tensors([x, y]), ctypes.c_char_p(b"backward"), tensor(both))
        print(both.tolist())
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            call(None)
        x.fill_(4.0)
        graph.replay()
        print(out.tolist())
        try:
            execute("aclnnAddCustom", c_void_p(0), tensor(y), scalar(1), none(), tensor(out))
        except RuntimeError as error:
            print(error)
        call(torch.ones(5, device="npu"))
        try:
            torch.npu.synchronize()
        except RuntimeError as error:
            print(str(error).replace(chr(10), " "))
    """)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_operator_in_cpp(outputs):
    assert outputs[0] == "[[2.5, 3.5, 4.5], [5.5, 6.5, 7.5]]"
    assert outputs[1] == "[[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]"


def test_operator_in_python(outputs):
    rows = [
        [2 * (value * 0.25 * factor + 7) for value, factor in zip(row, (1, 2, 0.5), strict=True)]
        for row in ([0, 1, 2], [3, 4, 5])
    ]
    assert outputs[2] == str([[float(value) for value in row] for row in rows])
    assert outputs[3] == str([[1.0] * 3] * 2 + [[3.0, 4.0, 5.0], [0.0, 1.0, 2.0]])


def test_a_replayed_graph_computes_again(outputs):
    assert outputs[4] == str([[16.0, 18.0, 15.0]] * 2)


@pytest.fixture(scope="module")
def extension():
    """A compiled torch extension, which knows nothing of the emulator."""
    source, torch = HERE / "extension_of_a_project.cpp", build.torch_dir()
    path = (
        build.cache_root()
        / "tests"
        / f"{build._digest(*build._versions(), source.read_bytes())}.so"
    )
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        options = (
            "-std=c++20",
            "-O0",
            "-fPIC",
            "-shared",
            f"-I{torch / 'include'}",
            f"-L{torch / 'lib'}",
        )
        subprocess.run(
            ["g++", *options, source, "-o", partial, "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"],
            check=True,
        )
        partial.rename(path)
    return path


def test_a_torch_extension_calls_the_operator(program, extension):
    done = program(f"""
        torch.ops.load_library({str(extension)!r})
        call = lambda kernel: torch.ops.a_project.add_custom(x, y, 2.5, kernel, torch.npu.current_stream().npu_stream)
        print(call("aclnnAddCustom").tolist())
        try:
            call("aclnnUnknownCustom")
        except RuntimeError as error:
            print(str(error).splitlines()[0])
    """)
    assert done.stdout.splitlines() == [
        "[[2.5, 3.5, 4.5], [5.5, 6.5, 7.5]]",
        "aclnnUnknownCustomGetWorkspaceSize not in libcust_opapi.so or libopapi.so",
    ], done.stderr


def test_errors_name_the_operator(outputs):
    assert (
        outputs[5]
        == "161002: [ascend-emulator] aclnnAddCustom: a required argument is null (CANN refuses, inferred)"
    )
    assert "aclnnScaleCustom: ValueError: bias has shape [5]" in outputs[6]


def test_an_undeclared_operator_is_refused_by_its_name(program):
    """EXEC_NPU_CMD finds neither function; so does any other caller."""
    done = program("own.aclnnUnknownCustomGetWorkspaceSize", declared=str(PYTHON))
    assert "undefined symbol: aclnnUnknownCustomGetWorkspaceSize" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.py", "def add(x): ...", "has no function whose name starts with aclnn"),
        (
            "wrong.py",
            "def aclnnA(x: complex): ...",
            "parameter x of aclnnA has the annotation 'complex'; supported: Tensor,",
        ),
        ("wrong.cpp", "int main() { return missing; }", "compiling your operators failed"),
    ],
)
def test_wrong_declarations_end_with_one_line(run, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    done = run("run", "--", "true", ASCEND_EMULATOR_OPERATORS=str(tmp_path / name))
    *compiler, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert message in last
    assert bool(compiler) == name.endswith(".cpp")


def test_a_missing_file_and_a_missing_module_end_with_one_line(run):
    for name in ("/nowhere/add.cpp", "no_such_project.emulated"):
        done = run("run", "--", "true", ASCEND_EMULATOR_OPERATORS=name)
        assert done.returncode == 2
        assert name in done.stderr


def test_a_module_is_found_without_importing_its_package(tmp_path, monkeypatch):
    """Importing it may import torch, which has to come after the emulator."""
    package = tmp_path / "a_project"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "emulated.py").write_text(
        "def aclnnCustom(x: 'torch.Tensor', n: int, out: 'torch.Tensor') -> None: ..."
    )
    monkeypatch.syspath_prepend(tmp_path)
    (result,) = operators.declared(operators._file("a_project.emulated"), "a_project.emulated")
    assert result == operators.Operator(
        "aclnnCustom", "a_project.emulated", (("x", "Tensor"), ("n", "int"), ("out", "Tensor"))
    )


def test_a_changed_header_is_compiled_again(tmp_path, monkeypatch):
    """Also one that is included as <…>; with other files nothing is compiled."""
    monkeypatch.setenv("CPATH", str(tmp_path))
    monkeypatch.setenv("ASCEND_EMULATOR_CACHE", str(tmp_path / "cache"))
    header, source = tmp_path / "factor.h", tmp_path / "scale.cpp"
    source.write_text(
        '#include <factor.h>\nextern "C" __attribute__((visibility("default"))) int factor() {'
        " return FACTOR; }\n"
    )
    seen = []
    for value in (2, 2, 3):
        if not seen or seen[-1][0] != value:
            header.write_text(f"#define FACTOR {value}\n")
            os.utime(header, (value, value))
        library = (
            build.custom_library([source], "", operators.HEADERS, "libfactor.so")
            / "op_api/lib/libfactor.so"
        )
        ask = [
            sys.executable,
            "-c",
            f"import ctypes; print(ctypes.CDLL({str(library)!r}).factor())",
        ]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(build.torch_dir() / "lib")}
        result = subprocess.run(
            ask, capture_output=True, text=True, env=environment, check=True
        ).stdout
        seen.append((int(result), library.stat().st_ino))
    assert [value for value, _ in seen] == [2, 2, 3]
    assert seen[0] == seen[1] != seen[2]


def test_an_entry_point_declares_operators(tmp_path, monkeypatch):
    points = "[ascend_emulator.operators]\nmine = operators_of_a_project\n"
    write_metadata(tmp_path, "a_project", "1", entry_points=points)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(HERE)
    built = operators.library({})
    assert built is not None
    exported = subprocess.run(
        ["nm", "-D", built / "op_api/lib" / operators.SONAME],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "aclnnScaleCustomGetWorkspaceSize" in exported
    assert "ascend_emulator" not in exported  # looked up when called
    assert built.parent.parent == build.cache_root()


def test_disabling_and_faults_apply_to_them_by_name(program, run):
    """As to CANN's; a name that neither has is refused."""
    add = """
        none = array("aclCreateIntArray", [], c_int64)
        try:
            execute("aclnnAddCustom", tensor(x), tensor(y), scalar(2.5), none, tensor(out))
        except RuntimeError as error:
            print(error)
    """
    for variable, value, message in (
        ("WITHOUT", "aclnnAddCustom", "200006: [ascend-emulator] aclnnAddCustom is not emulated"),
        ("FAULTS", "aclnnAddCustom@1=ecc", "injected: aclnnAddCustom@1=ecc"),
    ):
        done = program(add, **{f"ASCEND_EMULATOR_{variable}": value})
        assert message in done.stdout, done.stderr
    done = program(add, ASCEND_EMULATOR_FAULTS="aclnnAddCustm@1=ecc")
    assert done.returncode == 2
    assert "did you mean aclnnAddCustom?" in done.stderr


def test_an_operator_of_cann_that_is_not_emulated(run, tmp_path):
    """The refusal says how to supply it, and torch_npu's function computes with it."""
    x, steps = "torch.arange(8).int().view(2, 4).npu()", "torch.full((4,), 0.5).npu()"
    call = f"torch_npu.npu_dequant_bias({x}, {steps}, None, None, output_dtype=torch.half)"
    script = f"import torch, torch_npu; print({call}.tolist())"
    done = run("run", "--", sys.executable, "-c", script)
    assert done.stderr.rstrip().endswith(
        "aclnnDequantBias is not emulated; `ascend-emulator coverage` lists what is; fix: say what"
        " it computes, in a file of Python or C++ that ASCEND_EMULATOR_OPERATORS names"
        " (docs/emulator.md#operators-of-your-own)"
    )
    (tmp_path / "own.py").write_text(
        textwrap.dedent("""
            from torch import Tensor

            def aclnnDequantBias(x: Tensor, weight_scale: Tensor, activation_scale: Tensor | None,
                                 bias: Tensor | None, dtype: int, y: Tensor):
                y.copy_(x.float() * weight_scale)
        """)
    )
    declaration = str(tmp_path / "own.py")
    done = run("run", "--", sys.executable, "-c", script, ASCEND_EMULATOR_OPERATORS=declaration)
    assert done.stdout == "[[0.0, 0.5, 1.0, 1.5], [2.0, 2.5, 3.0, 3.5]]\n", done.stderr
