# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""register() in separate processes, as torch_npu finds its devices once per process."""

import gc
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import ascend_platform
import pytest
from ascend_platform.plugins.requirements import cpu_build
from ascend_platform.process import startup
from harness.project.distributions import write_metadata, write_vllm_ascend

SCRIPT = """
import ascend_platform
import sys
names = [ascend_platform.register() for _ in range(2)]
torch = sys.modules.get("torch")
opened = torch is not None and hasattr(torch, "npu") and torch.npu.is_initialized()
print("\\nresult", *names, "opened" if opened else "untouched")
"""


def run(prologue="", flags=(), **environment):
    env = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, *flags, "-c", prologue + SCRIPT],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (result,) = [
        line.split()[1:] for line in done.stdout.splitlines() if line.startswith("result ")
    ]
    return result, [line for line in done.stderr.splitlines() if "not activated" in line]


def test_device_returns_the_platform_and_creates_no_context():
    out, stderr = run()
    assert out == ["ascend_platform.platform.NPUPlatform"] * 2 + ["untouched"]
    assert stderr == []


def test_importing_the_platform_class_changes_nothing():
    """The entry point prepares the process; VLLM_PLUGINS leaves it out here."""
    script = """
import os, signal, sys, threading
import vllm.config
def state():
    return dict(os.environ), threading.enumerate(), sys.excepthook, signal.getsignal(signal.SIGTERM)
before = state()
import ascend_platform.platform
assert state() == before, (os.environ.items() ^ before[0].items(), before[1:], state()[1:])
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | {
        "VLLM_PLUGINS": ""
    }
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_cann_it_names_the_library_and_the_fix():
    # The libraries are found through LD_LIBRARY_PATH. torch would load torch_npu itself and fail
    # before us.
    out, stderr = run(LD_LIBRARY_PATH="", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out == ["None", "None", "untouched"]
    (line,) = stderr
    assert "library lib" in line
    assert ".so was not found" in line
    assert "set_env.sh" in line


@pytest.mark.parametrize(
    ("visible", "fix"),
    [("", "unset"), ("7", "unset"), ("a", "unset"), ("1,0", "export"), (" 0,1", "export")],
)
def test_without_a_visible_device_it_names_the_variable(visible, fix):
    out, stderr = run(ASCEND_RT_VISIBLE_DEVICES=visible)
    assert out == ["None", "None", "untouched"]
    (line,) = stderr
    assert f"no NPU is visible: ASCEND_RT_VISIBLE_DEVICES='{visible}' leaves 0 of " in line
    variable = "ASCEND_RT_VISIBLE_DEVICES"
    assert line.endswith(
        "ascending, without spaces; fix:"
        f" {f'export {variable}=0' if fix == 'export' else f'unset {variable}'}"
    )


def test_without_torch_npu_it_names_the_fix(tmp_path):
    # This environment without that one package: its other entries, linked, and no start-up files
    # (-S).
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("torch_npu"):
            (tmp_path / entry.name).symlink_to(entry)
    sources = Path(ascend_platform.__file__).parents[1]
    out, stderr = run(
        flags=["-S"],
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(sources)]),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert out == ["None", "None", "untouched"]
    (line,) = stderr
    assert "requires torch-npu" in line
    assert "not installed; fix: pip install" in line


def test_with_an_unsupported_torch_it_names_the_supported_one(tmp_path):
    write_metadata(tmp_path, "torch", "2.0.0")
    out, stderr = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n")
    assert out == ["None", "None", "untouched"]
    (line,) = stderr
    assert "found 2.0.0" in line
    assert f"pip install {cpu_build('torch', '2.13.0')} " in line


def test_with_an_unsupported_vllm_it_is_not_activated():
    out, stderr = run(VLLM_VERSION="0.99.0")
    assert out == ["None", "None", "untouched"]
    (line,) = stderr
    assert "vllm" in line
    assert "found 0.99.0" in line


@pytest.fixture
def vllm_ascend(tmp_path):
    """A directory for PYTHONPATH with the metadata of vllm-ascend."""
    write_vllm_ascend(tmp_path)
    return tmp_path


CONFLICT = (
    "vllm-ascend 0.18.0 is installed too and has plugins of the same name (ascend,"
    " ascend_kv_connector), of which vLLM keeps one; fix: pip uninstall -y vllm-ascend"
)


def test_with_vllm_ascend_nothing_is_activated(vllm_ascend):
    out, stderr = run(PYTHONPATH=str(vllm_ascend))
    assert out == ["None", "None", "untouched"]
    (line,) = stderr
    assert line.endswith(f"Ascend platform not activated: {CONFLICT}")


CUDA = (
    "is the CUDA build, beside which importing torch_npu aborts the process; fix: pip install"
    f" --force-reinstall --no-deps {cpu_build('torch', '2.13.0')}"
    " --index-url https://download.pytorch.org/whl/cpu"
)


def test_with_the_cuda_build_of_torch_nothing_is_activated(cuda_torch):
    out, stderr = run(PYTHONPATH=str(cuda_torch), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out[:2] == ["None", "None"]
    assert stderr[0].endswith(CUDA)
    (cuda_torch / "torch" / "lib" / "libc10_cuda.so").write_bytes(b"a stub without the allocator")
    _, stderr = run(PYTHONPATH=str(cuda_torch), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert not any(CUDA in line for line in stderr)


RARELY = "(100000, 20, 100)"
USUAL = str(gc.get_threshold())


@pytest.mark.parametrize(
    ("words", "variables", "thresholds"),
    [
        (["vllm", "serve"], {}, RARELY),
        (["vllm", "bench"], {}, USUAL),
        (["vllm", "serve"], {"VLLM_ASCEND_STARTUP_CHECKS": "0"}, USUAL),
        (["pytest", "vllm"], {}, USUAL),
        (["pytest", "--multiprocessing-fork"], {"VLLM_RPC_BASE_PATH": "directory"}, RARELY),
        (["pytest", "--multiprocessing-fork"], {}, USUAL),
    ],
)
def test_garbage_is_collected_rarely_while_vllm_is_imported(tmp_path, words, variables, thresholds):
    for name in ("vllm", "pytest"):
        (tmp_path / name).write_text("import gc; print(gc.get_threshold())")
    env = {
        name: value for name, value in os.environ.items() if name != "VLLM_RPC_BASE_PATH"
    } | variables
    command = [sys.executable, str(tmp_path / words[0]), *words[1:]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, thresholds), done.stderr


def test_garbage_is_collected_as_before_when_it_was_never_rare():
    script = (
        "import gc; from ascend_platform.process import startup; gc.set_threshold(9);"
        " startup.collect_garbage_as_before(); "
    )
    done = subprocess.run(
        [sys.executable, "-c", script + "print(gc.get_threshold()[0], gc.get_freeze_count())"],
        capture_output=True,
    )
    assert done.stdout.split() == [b"9", b"0"]


def test_vllm_as_a_module_is_the_program():
    assert startup.runs_vllm(["python3", "-u", "-m", "vllm.entrypoints.openai.api_server"])
    assert not startup.runs_vllm(["python3", "-m", "pytest", "vllm"])
    assert not startup.runs_vllm(["python3", "-c", "vllm"])


def test_components_are_disabled_with_vllm_ascend(vllm_ascend):
    script = (
        "import ascend_attention; from ascend_platform import extension;"
        " ascend_attention.register(); "
    )
    script += "print(extension.state('ascend-attention'))"
    env = {**os.environ, "PYTHONPATH": str(vllm_ascend)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip().endswith(f"disabled: {CONFLICT}"), done.stderr


def test_children_end_after_exits_in_destructors():
    """Python drops those that a handler of a signal raises there, silently; other exceptions are
    shown."""
    script = (
        "import signal, time\n"
        "from ascend_platform.process import startup; startup.run_child()\n"
        "class Raises:\n"
        "    def __init__(self, error): self.error = error\n"
        "    def __del__(self): raise self.error\n"
        "Raises(ValueError('shown')); Raises(SystemExit())\n"
        "try: time.sleep(60)\n"
        "except SystemExit:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('ended')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout == "ended\n"
    assert done.stderr.count("Traceback") == 1
    assert "ValueError: shown" in done.stderr


def test_the_last_collection_reports_no_leaks_of_triton():
    script = "import gc, sys; from ascend_platform.process import startup; {}; gc.freeze()"
    freeze = "startup.skip_last_collection(); import atexit; atexit._run_exitfuncs()"
    script += f"; {freeze}; print(gc.get_freeze_count() > 0)"
    for triton, frozen in (("", "True"), ("sys.modules['triton'] = sys", "False")):
        command = [sys.executable, "-c", script.format(triton or "pass")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"{frozen}\n"
