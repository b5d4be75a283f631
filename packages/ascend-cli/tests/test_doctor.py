# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``vllm-ascend doctor``, ``plugins`` and ``env`` in separate processes, in environments with real
faults.

The faults are environment variables, distribution metadata found first on PYTHONPATH, and linker
paths. Settings are in test_doctor_settings.py.
"""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from ascend_platform.plugins import COMPONENTS, requirements
from harness.project.distributions import write_metadata
from harness.project.doctor import CLI, SOURCES, bad, examine, failing, run


@pytest.fixture
def installed(tmp_path):
    """Installs a distribution's metadata in a directory for PYTHONPATH, and returns the
    directory."""

    def install(name, version, requires=(), points=""):
        write_metadata(tmp_path, name, version, requires, points)
        return tmp_path

    return install


def test_all_checks_pass():
    status, lines = examine()
    assert failing(lines) == {}
    assert status == 0
    categories = [
        "chip and driver",
        "CANN",
        "versions",
        "plugins",
        "triton",
        "environment",
        "HCCL",
        "disk and memory",
        "patches",
    ]
    assert list(dict.fromkeys(category for category, _ in lines)) == categories
    assert lines["chip and driver", "NPUs"][1] == "1 Ascend910B1"
    assert lines["CANN", "CANN"][1].startswith("9.1.0 in ")


# Chip, driver and CANN


def test_without_cann():
    status, lines = examine(LD_LIBRARY_PATH="", ASCEND_HOME_PATH="", ASCEND_OPP_PATH="")
    assert status == 1
    problems = bad(lines)
    assert list(problems) == [
        "driver",
        "NPUs",
        "CANN",
        "libraries that torch_npu links against",
        "operators (libopapi)",
        "libhccl.so",
    ]
    assert "libascend_hal.so" in problems["driver"][0]
    assert "install the NPU driver" in problems["driver"][1]
    assert problems["NPUs"][0] == "none found"
    for name in ("libascendcl.so", "libhccl.so", "libge_runner.so"):
        assert name in problems["libraries that torch_npu links against"][0]
    for title in list(problems)[2:]:
        assert "source its set_env.sh" in problems[title][1]


def test_with_one_library_of_cann_missing(tmp_path):
    for library in Path(os.environ["ASCEND_HOME_PATH"]).glob("*.so"):
        if library.name != "libge_runner.so":
            (tmp_path / library.name).symlink_to(library)
    status, lines = examine(LD_LIBRARY_PATH=str(tmp_path))
    assert status == 1
    assert {title: problems for title, (problems, _) in failing(lines).items()} == {
        "libraries that torch_npu links against": "not found: libge_runner.so"
    }


@pytest.mark.parametrize(
    ("variable", "title"), [("ASCEND_HOME_PATH", "CANN"), ("ASCEND_OPP_PATH", "ASCEND_OPP_PATH")]
)
def test_cann_paths_that_do_not_exist(variable, title):
    status, lines = examine(**{variable: "/no/such/place"})
    assert status == 1
    assert "/no/such/place does not exist" in failing(lines)[title][0]


@pytest.mark.parametrize(
    ("listed", "state", "says", "fix"),
    [
        ("", "fail", "leaves 0 of 2", "unset ASCEND_RT_VISIBLE_DEVICES"),
        ("7", "fail", "leaves 0 of 2", "unset ASCEND_RT_VISIBLE_DEVICES"),
        ("1,0", "fail", "leaves 0 of 2", "export ASCEND_RT_VISIBLE_DEVICES=0,1"),
        ("0, 1", "warn", "leaves 1 of 2", "export ASCEND_RT_VISIBLE_DEVICES=0,1"),
        ("npu0", "fail", "leaves 0 of 2", "export ASCEND_RT_VISIBLE_DEVICES=0"),
        ("0,1", "ok", "2 of 2", ""),
    ],
)
def test_visible_devices(listed, state, says, fix):
    status, lines = examine(ASCEND_RT_VISIBLE_DEVICES=listed, ASCEND_EMULATOR_NPUS="2")
    assert lines["chip and driver", "NPUs"][1].startswith("2 ")
    line = lines["chip and driver", "ASCEND_RT_VISIBLE_DEVICES"]
    assert (line[0], line[2], status) == (state, fix, int(state == "fail"))
    assert says in line[1]


# Versions


def test_another_torch_npu(installed):
    """The check at load reads the metadata that is found first."""
    status, lines = examine(path=[installed("torch-npu", "2.7.1", ["torch==2.7.1"])])
    assert status == 1
    problems = failing(lines)
    torch, vision = (
        requirements.cpu_build("torch", "2.7.1"),
        requirements.cpu_build("torchvision", "0.22.1"),
    )
    assert problems["requirements of ascend-platform"][0].endswith(", found 2.7.1")
    assert problems["requirements of ascend-platform"][1].startswith("pip install 'torch-npu")
    assert (
        problems["requirements of torch-npu"][1]
        == f"pip install {torch} {vision} --index-url {requirements.CPU_INDEX}"
    )
    assert "disabled" in problems["ascend of ascend-platform 0.1.0"][0]


def test_another_vllm_by_metadata_and_the_overriding_variable(installed):
    path = [installed("vllm", "0.18.0", ["torch==2.10.0", "torch==1; extra == 'old'"])]
    status, lines = examine(path=path)
    assert status == 1
    problems = failing(lines)
    ours = ", ".join(
        f"ascend-{name}"
        for name in (
            "platform",
            "attention",
            "cli",
            "communicator",
            "kv-connector",
            "model-loader",
            "models",
            "patches",
            "quantization",
        )
    )
    reason, fix = problems[f"requirements of {ours}"]
    assert "found 0.18.0" in reason
    of_source = (
        "VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 pip install --no-binary vllm 'vllm"
    )
    assert fix.startswith(of_source)
    reason, fix = bad(lines)["torch for vLLM"]
    assert reason == "vLLM requires torch==2.10.0, found 2.13.0+cpu"
    assert re.match(
        of_source + r"\S+' torch==2\.13\.0, or ignore this if Compatibility lists this pair", fix
    )
    status, lines = examine(path=path, VLLM_VERSION="0.32.0")
    assert status == 0
    assert (
        lines["versions", "VLLM_VERSION"][1]
        == "'0.32.0' replaces the version of the installed vLLM (0.18.0)"
    )


@pytest.mark.parametrize("version", ["0.18.0", "main"])
def test_vllm_version_that_is_unsupported_or_invalid(version):
    status, lines = examine(VLLM_VERSION=version)
    assert status == 1
    assert {fix for _, fix in failing(lines).values()} == {"unset VLLM_VERSION"}


def test_the_cuda_build_of_torch(cuda_torch):
    status, lines = examine(path=[cuda_torch])
    assert status == 1
    problems, fix = failing(lines)["torch"]
    assert "is the CUDA build, beside which importing torch_npu aborts" in problems
    install = f"pip install --force-reinstall --no-deps {requirements.cpu_build('torch', '2.13.0')}"
    assert fix == f"{install} --index-url {requirements.CPU_INDEX}"


def test_metadata_without_its_package(tmp_path):
    """torch_npu's metadata without its files: links to this environment except for these, without
    start-up files."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name != "torch_npu" and (
            not entry.name.startswith("ascend_")
            or entry.name.startswith(("ascend_cli-", "ascend_platform-"))
        ):
            (tmp_path / entry.name).symlink_to(entry)
    status, lines = examine(flags=["-S"], path=[tmp_path])
    assert status == 1
    assert failing(lines)["torch-npu"][1] == "pip install --force-reinstall --no-deps torch-npu"
    assert (
        failing(lines)["libraries that torch_npu links against"][0] == "torch_npu is not installed"
    )


def test_with_the_platform_and_the_command_only(tmp_path):
    """Without torch, torch_npu, vLLM, rich and other components the doctor runs and names what is
    missing."""
    site = Path(sysconfig.get_path("purelib"))
    for name in (
        "packaging",
        *(path.name for path in site.glob("packaging-*")),
        *(path.name for wheel in ("cli", "platform") for path in site.glob(f"ascend_{wheel}-*")),
    ):
        (tmp_path / name).symlink_to(site / name)
    status, lines = examine(flags=["-S"], path=[tmp_path], LD_LIBRARY_PATH="")
    assert status == 1
    problems = failing(lines)
    for name in ("vllm", "torch", "torch-npu"):
        assert problems[name][0] == "not installed"
        assert "pip install " in problems[name][1]
    for command in ("plugins", "env"):
        done = run(command, flags=["-S"], path=[tmp_path], LD_LIBRARY_PATH="")
        assert (done.returncode, done.stderr) == (0, "")


# Plugins and vllm-ascend


def test_vllm_ascend_is_installed_too(installed):
    points = "[vllm.platform_plugins]\nascend = vllm_ascend:register\n[vllm.general_plugins]\n"
    points += "ascend_kv_connector = vllm_ascend:a\nascend_model = vllm_ascend:b\n"
    directory = installed("vllm-ascend", "0.18.0", points=points)
    (directory / "vllm_ascend.py").write_text("")
    status, lines = examine(path=[directory])
    assert status == 1
    problems = failing(lines)
    assert problems["vllm-ascend"][1] == "pip uninstall -y vllm-ascend"
    shadowed = {
        title: fix
        for title, (reason, fix) in problems.items()
        if "has a plugin of the same name" in reason
    }
    assert [title.split()[0] for title in shadowed] == ["ascend", "ascend_kv_connector"]
    assert set(shadowed.values()) == {"pip uninstall -y vllm-ascend"}


def test_shadowed_plugin_another_platform_and_a_missing_module(installed):
    points = (
        "[vllm.general_plugins]\nascend_attention = other:register\nlost ="
        " no_such_module:register\n"
    )
    directory = installed(
        "other-wheel", "1.0", points=points + "[vllm.platform_plugins]\nother = other:register\n"
    )
    (directory / "other.py").write_text("")
    _, lines = examine(path=[directory])
    problems = bad(lines)
    assert list(problems) == [
        "ascend_attention of other-wheel 1.0",
        "lost of other-wheel 1.0",
        "other, another platform",
    ]
    assert "vLLM keeps one" in problems["ascend_attention of other-wheel 1.0"][0]
    assert "no module no_such_module" in problems["lost of other-wheel 1.0"][0]
    assert {fix for title, (_, fix) in problems.items() if "lost" not in title} == {
        "pip uninstall -y other-wheel"
    }
    assert lines["plugins", "other, another platform"][0] == "warn"


def test_a_disabled_component(installed):
    points = "[vllm.general_plugins]\nascend_attention = ascend_attention:register\n"
    directory = installed("ascend-attention", "9.0", ["ascend-platform>=9"], points)
    status, lines = examine(path=[directory])
    assert status == 1
    problems, fix = failing(lines)["ascend_attention of ascend-attention 9.0"]
    assert problems.startswith("disabled: requires ascend-platform>=9, found 0.1.0")
    assert fix == "pip install --upgrade vllm-ascend-all"


@pytest.mark.parametrize(
    ("name", "version", "requires"),
    [
        ("ascend-platform", "0.2.0", []),
        ("ascend-attention", "0.2.0", ["ascend-platform<0.3,>=0.2"]),
    ],
)
def test_wheels_of_two_versions_have_one_fix(installed, name, version, requires):
    """Whichever wheel is newer: no fix leaves another wheel with an unmet requirement."""
    entry = COMPONENTS[name]
    group = "platform" if entry == "ascend" else "general"
    points = f"[vllm.{group}_plugins]\n{entry} = {name.replace('-', '_')}:register\n"
    _, lines = examine(path=[installed(name, version, requires, points)])
    fixes = {fix for _, fix in failing(lines).values()}
    assert fixes == {"pip install --upgrade vllm-ascend-all"}
    assert len(failing(lines)) >= 2


def test_third_party_component_is_upgraded_with_the_family(installed, monkeypatch):
    monkeypatch.syspath_prepend(installed("my-wheel", "1.0", ["ascend-platform>=0.2"]))
    fix = "pip install --upgrade vllm-ascend-all my-wheel"
    assert requirements.unmet("my-wheel").fix == fix


def test_without_the_meta_wheel_all_installed_ones_are_upgraded(monkeypatch):
    versions = {"ascend-platform": "0.2.0", "ascend-patches": "0.1.0"}
    monkeypatch.setattr(requirements, "version", lambda name: versions.get(name, ""))
    command = "pip install --upgrade ascend-platform ascend-patches"
    assert requirements.upgrade_command() == command


def test_invalid_metadata_fails_the_check(installed):
    status, lines = examine(path=[installed("ascend-attention", "9.0", ["!! no requirement"])])
    assert status == 1
    assert failing(lines)["versions"][0].startswith("could not be checked: InvalidRequirement")
    assert "vllm-ascend env" in failing(lines)["versions"][1]
    assert lines["triton", "triton"][0] == "ok"


def test_checks_of_other_wheels_and_one_that_raises(installed):
    points = (
        "[vllm_ascend.checks]\nfruit = fruit:check\nrotten = fruit:raises\nlost ="
        " no_such_module:check\n"
    )
    directory = installed("fruit", "1.0", points=points)
    lines = [
        "def check(options):",
        "    yield 'apple', 'warn', 'has a worm', 'cut it'",
        "def raises(options):",
        "    1 / 0",
    ]
    (directory / "fruit.py").write_text("\n".join(lines))
    status, lines = examine(path=[directory])
    assert status == 1
    assert lines["fruit", "apple"] == ("warn", "has a worm", "cut it")
    assert (
        lines["rotten", "rotten"][1] == "could not be checked: ZeroDivisionError: division by zero"
    )
    assert "no_such_module" in lines["lost", "lost"][1]


def test_two_tritons(installed):
    installed("triton", "3.5.0")
    status, lines = examine(path=[installed("triton-ascend", "3.2.1")])
    assert status == 1
    problems, fix = failing(lines)["triton"]
    assert "triton 3.5.0 and triton-ascend 3.2.1" in problems
    assert (
        fix == "pip uninstall -y triton triton-ascend && pip install --no-deps triton-ascend==3.2.1"
    )


# Variables


@pytest.mark.parametrize("command", ["doctor", "plugins", "env"])
def test_commands_import_no_heavy_modules(command):
    script = f"import sys\nfrom ascend_cli.main import main\nmain([{command!r}, '--json'])\n"
    script += (
        "print(sorted({'torch', 'torch_npu', 'vllm', 'numpy', 'rich'} & {*sys.modules}),"
        " file=sys.stderr)"
    )
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120
    )
    json.loads(done.stdout)
    assert done.stderr == "[]\n"


def test_a_misspelled_command_names_the_nearest():
    done = run("docter", "--json")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "vllm-ascend: error: there is no command 'docter'; fix: vllm-ascend doctor"
    )
    assert "invalid choice: 'zzz' (choose from" in run("zzz").stderr


@pytest.mark.parametrize("command", ["env", "plugins", "patches list"])
def test_a_reader_that_ends_first_is_no_error(command):
    """As `head` does; `true` ends before anything is written."""
    program = [sys.executable, *CLI, *command.split()]
    line = f"{shlex.join(program)} | true; echo ${{PIPESTATUS[0]}}"
    environ = {**os.environ, "PYTHONPATH": SOURCES}
    done = subprocess.run(
        ["bash", "-c", line], env=environ, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (f"{128 + signal.SIGPIPE}\n", "")


def test_plain_in_a_pipe_and_pretty_on_a_terminal():
    done = run("doctor", VLLM_TARGET_DEVICE="cpu")
    assert done.returncode == 1
    assert (
        "  FAIL VLLM_TARGET_DEVICE: 'cpu' makes vLLM use the CPU; fix: unset VLLM_TARGET_DEVICE\n"
        in done.stdout
    )
    assert "\x1b" not in done.stdout
    environ = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "TERM": "xterm-256color", "COLUMNS": "60"}
    environ["PYTHONPATH"] = os.pathsep.join([SOURCES, environ.get("PYTHONPATH", "")])
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, *CLI, "doctor"], env=environ, stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while more := os.read(ours, 65536):
                shown += more
        except OSError:  # end of a pseudo-terminal
            pass
    os.close(ours)
    assert process.returncode == 1
    assert "\N{CHECK MARK} NPUs: 1 Ascend910B1".encode() in shown
    assert b"\x1b[" in shown
    assert (
        "\N{BALLOT X} VLLM_TARGET_DEVICE: 'cpu' makes vLLM use the CPU; fix: unset"
        " VLLM_TARGET_DEVICE".encode()
        in shown
    )


def test_help_fits_the_terminal_and_a_category_needs_no_quotes():
    done = run("doctor", "--help", COLUMNS="60")
    usage, _, keys = done.stdout.partition("keys of --additional-config")
    assert "disk-and-memory" in usage
    assert len(keys.splitlines()) > 20
    plan = run("plan", "--help", COLUMNS="60").stdout
    assert [line for line in (done.stdout + plan).splitlines() if len(line) > 60] == []
    done = run("doctor", "disk-and-memory", "--json")
    assert {each["category"] for each in json.loads(done.stdout)["checks"]} == {"disk and memory"}


def test_plugins_lists_states():
    done = run("plugins", "--json", VLLM_PLUGINS="ascend,ascend_patches")
    assert done.returncode == 0
    plugins = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert plugins["ascend"] | {"version": ""} == {
        "name": "ascend",
        "group": "vllm.platform_plugins",
        "distribution": "ascend-platform",
        "version": "",
        "state": "active",
        "why": "",
        "fix": "",
    }
    assert plugins["ascend_patches"]["state"] == "active"
    assert plugins["ascend_attention"]["state"] == "off"
    table = run("plugins", VLLM_PLUGINS="ascend,ascend_patches").stdout
    fixes = {line.partition("fix: ")[2] for line in table.splitlines() if "  off  " in line}
    (fix,) = fixes - {""}
    assert {*fix.removeprefix("export VLLM_PLUGINS=").split(",")} == {*COMPONENTS.values()}


def test_env_shows_versions_and_hides_secrets():
    done = run("env", "--json", HF_TOKEN="hf_1234", VLLM_PLUGINS="ascend")
    result = json.loads(done.stdout)
    assert result["npu"]["npus"] == "1"
    assert result["npu"]["cann"] == "9.1.0"
    assert {"vllm", "torch", "torch-npu", "ascend-platform"} <= {*result["wheels"]}
    assert result["environment"]["VLLM_PLUGINS"] == "ascend"
    assert result["environment"]["HF_TOKEN"] == "(hidden)"
    assert "hf_1234" not in done.stdout
    assert "hf_1234" not in run("env", HF_TOKEN="hf_1234").stdout


def test_cann_and_driver_versions_of_an_installation(tmp_path):
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text("# x\nVersion=8.5.1\nother=1\n")
    assert (
        json.loads(run("env", "--json", ASCEND_HOME_PATH=str(tmp_path)).stdout)["npu"]["cann"]
        == "8.5.1"
    )
