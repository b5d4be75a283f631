# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The command line, the build, and activation inside a process."""

import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ascend_emulator import build, limits
from ascend_emulator.activation import parse_size
from ascend_emulator.chips import chip

SHOW = (
    "import os; print(*(os.environ.get('ASCEND_EMULATOR_' + n) for n in ('NPUS', 'SOC', 'MEMORY')))"
)


def python(*code, **environment):
    return subprocess.run(
        [sys.executable, *code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8g", 8 << 30),
        ("512MiB", 512 << 20),
        ("1.5GB", 3 << 29),
        ("8589934592", 8 << 30),
        ("64 kib", 64 << 10),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "8 apples", "GiB"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="use a form such as 8GiB"):
        parse_size(text)


def test_run_says_so_in_one_line_and_describes_the_machine(run):
    done = run(
        "run",
        "--npus",
        "3",
        "--soc",
        "Ascend910B4",
        "--memory",
        "1GiB",
        "--",
        sys.executable,
        "-c",
        SHOW,
    )
    assert done.stdout == "3 Ascend910B4 1073741824\n"
    unit = limits.vector_unit(os.environ)
    assert (
        done.stderr
        == "ascend-emulator: 3 emulated NPUs (Ascend910B4, 1 GiB of its 32 GiB), computed on this"
        f" CPU ({unit})\n"
    )


def test_run_hands_on_status_and_arguments(run):
    done = run(
        "run",
        sys.executable,
        "-c",
        "import sys; print(sys.argv[1:]); sys.exit(7)",
        "--npus",
        "9",
        "--",
        "x",
    )
    assert (done.returncode, done.stdout) == (7, "['--npus', '9', '--', 'x']\n")


def test_programs_link_against_the_installation(run, tmp_path):
    """By ASCEND_HOME_PATH, as DeepSpeed's builder does."""
    source, library = tmp_path / "count.c", tmp_path / "libcount.so"
    function = "unsigned count() { unsigned n; return aclrtGetDeviceCount(&n) ? 0 : n; }"
    source.write_text(f"int aclrtGetDeviceCount(unsigned *);\n{function}")
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    linked = (
        f"{compiler} -shared -fPIC -o {library} {source} -L$ASCEND_HOME_PATH/lib64"
        " -Wl,--no-as-needed -lascendcl"
    )
    asked = f"{sys.executable} -c 'import ctypes, torch; print(ctypes.CDLL(\"{library}\").count())'"
    done = run("run", "--npus", "3", "--", "sh", "-ec", f"{linked}; {asked}")
    assert done.stdout == "3\n", done.stderr


def test_child_processes_compute_too(run):
    child = (
        f'{sys.executable} -c "import torch; print(torch.npu.device_count(),'
        ' torch.ones(3).npu().sum().item())"'
    )
    done = run("run", "--npus", "2", "--memory", "1GiB", "--", "sh", "-c", f"{child}; echo end")
    assert (done.returncode, done.stdout) == (0, "2 3.0\nend\n"), done.stderr
    assert done.stderr.count("emulated NPU") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ["run", "--soc", "Ascend910B7", "--", "true"],
            2,
            "run: unknown chip 'Ascend910B7'; did you mean Ascend910B4?; supported: Ascend910B1, ",
        ),
        (["run"], 2, "no command given; add it after --"),
        (["run", "--npus", "2"], 2, "no command given"),
        (
            ["run", "--", "no-such-program"],
            127,
            "cannot start no-such-program: No such file or directory",
        ),
        (["run", "--npus", "0", "--", "true"], 2, "run: 0 NPUs requested; supported: 1 to "),
        (["run", "--npus", "65", "--", "true"], 2, "65 NPUs requested"),
        (["run", "--nups", "2", "--", "true"], 2, "run: --nups is no option; did you mean --npus?"),
        (["run", "--memory", "1MiB", "--", "true"], 2, "the minimum is 64 MiB"),
        (["run", "--numerics", "fast", "--", "true"], 2, "run: argument --numerics: 'fast'; supp"),
        (["run", "--driver", "new", "--", "true"], 2, "run: driver version 'new'; use a form such"),
        (
            ["run", "--without", "aclnnAdd,aclnnMatmull", "--", "true"],
            2,
            "run: no entry point of CANN is called 'aclnnMatmull' (ASCEND_EMULATOR_WITHOUT);"
            " did you mean aclnnMatmul?",
        ),
        (
            ["run", "--allow", "rms_norm.gama-shape", "--", "true"],
            2,
            "run: there is no rule 'rms_norm.gama-shape' (ASCEND_EMULATOR_ALLOW); did you mean"
            " rms_norm.gamma-shape?",
        ),
        (["trace", "no-such.json"], 2, "trace: cannot use no-such.json: No such file or directory"),
        (["trace", "/"], 2, "trace: cannot use /: Is a directory"),
        (
            ["verify", "--only", "operator"],
            2,
            "unknown section 'operator'; did you mean operators?",
        ),
        (["verify", "--diff", "no-a", "no-b"], 2, "verify: cannot use no-a: No such file or direc"),
        (["verify", "--quick", "--output", "/no-such/r"], 2, "/no-such is not a directory that th"),
        (
            ["coverage", "--mardown"],
            2,
            "coverage: --mardown is no option; did you mean --markdown?",
        ),
        (
            ["run", "--memory", "8X", "--", "true"],
            2,
            "invalid memory size '8X'; use a form such as 8GiB or 8589934592",
        ),
        (["fly"], 2, "invalid choice: 'fly'"),
    ],
)
def test_mistakes_are_answered_in_a_line(run, arguments, status, message):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    *before, line = done.stderr.splitlines()
    assert line.startswith("ascend-emulator")
    assert message in line
    assert len(before) == (status == 127)


def test_version(run):
    done = run("--version")
    assert (done.returncode, done.stdout) == (
        0,
        f"ascend-emulator {importlib.metadata.version('ascend-emulator')}\n",
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("POISON", "yes", "0 and 1"),
        ("ADVERSARY", "-1", "a number"),
        ("NUMERICS", "avx2", "generic, jitter:SEED, or both separated by a comma"),
        ("SANITIZE", "address,thread", "address,undefined, and thread"),
    ],
)
def test_values_of_variables_are_checked(run, name, value, allowed):
    done = run("run", "--", "true", **{f"ASCEND_EMULATOR_{name}": value})
    assert done.returncode == 2
    assert (
        done.stderr == f"ascend-emulator run: ASCEND_EMULATOR_{name} is {value!r}; supported:"
        f" {allowed}; fix: correct or unset it\n"
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("POISN", "1", "ASCEND_EMULATOR_POISN is no variable of the emulator; did you mean"),
        ("WITHOUT", "aclnnNope", "no entry point of CANN is called 'aclnnNope'"),
        ("FAULTS", "aclrtMallocc@1=oom", "aclrtMallocc is no entry point, nor one of stream,"),
        ("ALLOW", "no.rule", "there is no rule 'no.rule'"),
        ("OPERATORS", "nosuch.py", "nosuch.py is not a C++ (.cpp, .cc) or Python (.py) file"),
    ],
)
def test_names_in_variables_are_checked(run, name, value, message):
    done = run("run", "--", "true", **{f"ASCEND_EMULATOR_{name}": value})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("ascend-emulator run: ")
    assert message in line


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("ASCEND_EMULATOR_WITHOUT=aclnnNope", "no entry point of CANN is called 'aclnnNope'"),
        ("ASCEND_EMULATOR_ALLOW=rms_norm.gama-shape", "did you mean rms_norm.gamma-shape?"),
    ],
)
def test_variables_that_a_command_sets_are_checked(run, variable, message):
    """After `run` has looked at them: each call of CANN fails."""
    script = "import torch; torch.ones(1).npu()"
    done = run("run", "--", "env", variable, sys.executable, "-c", script)
    assert done.returncode == 1
    assert message in done.stderr


def test_names_that_are_known_are_taken(run):
    """Of operators that are not emulated too, of legacy operators, and with blanks."""
    names = "aclnnDequantBias, aclop::Fill,drvGetDevNum,atb::Rope"
    script = "import torch; torch.ones(1).npu()"
    done = run("run", "--without", names, "--", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr


def test_output_into_a_pipe_that_ends(run):
    """As with `head`: without a message, and with the status that a shell has for the signal."""
    command = f"{sys.executable} -m ascend_emulator.cli rules"
    done = run(
        "run", "--", "bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}; yes | head -1"
    )
    assert done.stdout == "141\ny\n"
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("action", ["run", "build", "trace", "rules", "coverage", "verify"])
def test_help_describes_each_subcommand(run, action):
    listed = re.search(rf"^    {action} +(\w.*)$", run("--help").stdout, re.MULTILINE)
    assert listed
    text = " ".join(run(action, "--help").stdout.split())
    assert f"ascend-emulator {action}" in text
    assert listed[1] in text


@pytest.mark.parametrize("actions", [[], ["run"], ["verify"]])
def test_help_fits_the_terminal(run, actions):
    lines = run(*actions, "--help", COLUMNS="60").stdout.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if len(line) > 60] == []


@pytest.mark.parametrize("generic", [False, True])
def test_vector_unit_is_reported_and_can_be_avoided(run, generic):
    """Sums have the order of the vector unit. The line has what the kernels, ATen, MKL and oneDNN
    are told."""
    ask = "ctypes.CDLL('libascend_emulator.so').ascend_emulator_vector_unit"
    kernels = (
        f"f = {ask}; f.restype = ctypes.c_char_p; print(f().decode(),"
        " torch.backends.cpu.get_cpu_capability())"
    )
    environment = {"ASCEND_EMULATOR_NUMERICS": "generic"} if generic else {}
    done = run("run", "--", sys.executable, "-c", f"import ctypes, torch; {kernels}", **environment)
    unit, aten = done.stdout.split()
    assert f", computed on this CPU ({unit})" in done.stderr
    assert (
        (unit, aten) == ("generic", "DEFAULT")
        if generic
        else (limits.vector_unit(os.environ), aten)
    )


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
def test_generic_code_of_mkl_and_onednn(run):
    """By what both print of themselves at their first use."""
    calls = (
        "import torch; a = torch.ones(64, 64); a @ a;"
        " torch.relu(a.to_mkldnn()) if torch.backends.mkldnn.is_available() else 0"
    )
    verbose = {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1", "ASCEND_EMULATOR_NUMERICS": "generic"}
    done = run("run", "--", sys.executable, "-c", calls, **verbose)
    assert set(re.findall(r"CNR:(\w+)", done.stdout)) == {"COMPATIBLE"}
    assert re.findall(r"cpu,isa:(.*)", done.stdout) == ["Intel SSE4.1"]


def test_without_a_compiler_one_line_names_what_to_install(run, tmp_path):
    done = run("build", PATH=str(tmp_path), CXX="", ASCEND_EMULATOR_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "ascend-emulator needs a C++ compiler and found none: apt-get install g++ (or dnf install"
        " gcc-c++), or set CXX; or pip install ascend-emulator[libs], which has compiled libraries"
    ]


def test_compiler_that_fails_is_reported_in_a_line(run, tmp_path):
    compiler = tmp_path / "broken"
    message = "x.cpp:1: error: no such luck\\nbecause of this\\n"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ echo broken 1.0; exit; }}\nprintf "{message}" >&2;'
        " exit 1\n"
    )
    compiler.chmod(0o755)
    done = run("build", CXX=str(compiler), ASCEND_EMULATOR_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("failed: x.cpp:1: error: no such luck")
    # all that the compiler said
    assert "\nx.cpp:1: error: no such luck\nbecause of this\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("cache/*/complete"))


def test_compiler_with_arguments(tmp_path, monkeypatch):
    """As build systems have it: CXX="ccache g++"."""
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"{launcher} g++")
    command, version = build.cxx()
    assert command == [str(launcher), "g++"]
    assert version.endswith(" g++")
    monkeypatch.setenv("CXX", "/no/such/g++ -m64")
    with pytest.raises(
        build.BuildError, match=r"CXX names /no/such/g\+\+, which is no program on PATH; fix: "
    ):
        build.cxx()


def test_cuda_build_of_torch_is_refused_in_a_line(run, tmp_path):
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    info = tmp_path / "torchvision-9.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 9.8\n")
    done = run("build", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    version = importlib.metadata.version("torch").partition("+")[0]
    local = "+cpu" if platform.machine() == "x86_64" else ""
    assert done.stderr.splitlines() == [
        f"ascend-emulator: torch {version} is a CUDA build, beside which torch-npu aborts; torch's"
        f" CPU build is supported; fix: pip install --force-reinstall --no-deps"
        f" 'torch=={version}{local}' 'torchvision==9.8{local}' --index-url https://download.pytorch.org/whl/cpu"
    ]


@pytest.mark.parametrize("printed", ["910B4-1", "ascend910b4-1", "Ascend910_9391", "310P3"])
def test_a_chip_is_known_by_the_name_that_machines_print(printed):
    assert printed.lower() in chip(printed).name.lower()


def test_a_reader_that_ends_first_is_no_error():
    command = f"{sys.executable} -m ascend_emulator.cli rules | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{128 + signal.SIGPIPE}\n", "")


def test_without_torch_npu_one_line_names_what_to_install():
    source = Path(build.__file__).parents[1]
    script = (
        f"import sys; sys.path.append({str(source)!r}); from ascend_emulator.cli import main;"
        " sys.exit(main(['build']))"
    )
    done = python("-S", "-c", script)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "ascend-emulator needs torch, which is not installed: pip install torch==2.13.0"
        " torch-npu==2.13.0"
    ]


def test_second_build_is_instant(run):
    started = time.monotonic()
    done = run("build")
    assert time.monotonic() - started < 30  # a compilation takes minutes
    assert (done.stdout, done.stderr) == (f"{build.library_dir()}\n", "")


def test_concurrent_builds_do_not_collide(run, tmp_path):
    """Four at once into an empty cache that has the compiled files, so that only linking is left:
    one does it."""
    (tmp_path / "objects").symlink_to(build.cache_root() / "objects")
    command = [sys.executable, "-m", "ascend_emulator.cli", "build"]
    environment = {**os.environ, "ASCEND_EMULATOR_CACHE": str(tmp_path)}
    several = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=120) for process in several]
    assert [process.returncode for process in several] == [0] * 4
    directories = {out.strip() for out, _ in outputs}
    assert directories == {str(tmp_path / build.library_dir().name)}
    assert sorted("compiled in" in log for _, log in outputs) == [False, False, False, True]
    original = build.library_dir()
    assert {path.name for path in (tmp_path / original.name).glob("*.so")} == {
        path.name for path in original.glob("*.so")
    }


def test_coverage_command(run):
    done = run("coverage")
    assert done.returncode == 0
    assert done.stdout.split("\n")[0].split() == ["computed", "bookkeeping", "refuses"]


def test_activation_in_a_process_and_its_children():
    script = f"""
import ascend_emulator, subprocess, sys
ascend_emulator.activate(npus=2, soc="Ascend910B3", memory=1 << 30)
ascend_emulator.activate(npus=2, soc="Ascend910B3", memory=1 << 30)
import torch
print(torch.npu.device_count(), torch.npu.get_device_name(), torch.ones(5, device="npu:1").sum().item(), flush=True)
subprocess.run([sys.executable, "-c", {SHOW!r}])
"""
    done = python("-c", script, LD_LIBRARY_PATH="")
    assert done.stdout == "2 Ascend910B3 5.0\n2 Ascend910B3 1073741824\n", done.stderr
    assert done.stderr.count("emulated NPUs") == 1


def test_strict_programs_have_poisoned_memory_and_the_adversary(run):
    script = "import os, torch, torch_npu; x = torch.empty(9, device='npu'); "
    script += "print(os.environ['ASCEND_EMULATOR_ADVERSARY'], x.isnan().all().item())"
    done = run(
        "run",
        "--strict",
        "--adversary",
        "7",
        "--memory",
        "256MiB",
        "--",
        sys.executable,
        "-c",
        script,
    )
    assert done.stdout == "7 True\n", done.stderr
