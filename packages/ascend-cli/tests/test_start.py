# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Starts of vLLM's commands in environments that cannot serve: one line with the cause and the
fix."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ascend_platform.plugins.requirements import cpu_build

CONFLICT = (
    "vllm-ascend 0.18.0 is installed too and has plugins of the same name (ascend,"
    " ascend_kv_connector), of which vLLM keeps one; fix: pip uninstall -y vllm-ascend"
)
CUDA = (
    "is the CUDA build, beside which importing torch_npu aborts the process; fix: pip install"
    f" --force-reinstall --no-deps {cpu_build('torch', '2.13.0')}"
    " --index-url https://download.pytorch.org/whl/cpu"
)


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_vllm_command_without_cann_ends_in_one_line(autoload):
    # Through the wheel's ascend_platform.pth. torch loads torch_npu itself, or transformers does.
    env = {**os.environ, "LD_LIBRARY_PATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    command = [str(Path(sys.executable).parent / "vllm"), "serve", "a-model"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ascend-platform: CANN's library lib")
    assert "set_env.sh" in last
    assert "Traceback" not in done.stderr
    assert "Failed to infer device type" not in done.stderr


def test_vllm_command_with_vllm_ascend_ends_in_one_line(vllm_ascend):
    command = [str(Path(sys.executable).parent / "vllm"), "serve", "a-model"]
    env = {**os.environ, "PYTHONPATH": str(vllm_ascend)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"ascend-platform: {CONFLICT}\n")


def test_vllm_command_with_cuda_torch_ends_in_one_line(cuda_torch, tmp_path):
    (tmp_path / "vllm").write_text("import torch")
    env = {**os.environ, "PYTHONPATH": str(cuda_torch)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "vllm")],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ascend-platform: torch 2.13.0")
    assert line.endswith(CUDA)


@pytest.mark.parametrize(
    ("words", "variables", "stopped"),
    [
        (["vllm", "serve"], {}, True),
        (["-u", "vllm", "serve"], {}, True),
        (["vllm", "serve"], {"VLLM_ASCEND_STARTUP_CHECKS": "0"}, False),
        (["pytest", "vllm"], {}, False),
    ],
)
def test_start_up_is_checked_where_vllm_is_the_program(
    vllm_ascend, tmp_path, words, variables, stopped
):
    for name in ("vllm", "pytest"):
        (tmp_path / name).write_text("print('started')")
    words = [
        str(tmp_path / word) if word in ("vllm", "pytest") and word != words[-1] else word
        for word in words
    ]
    env = {**os.environ, "PYTHONPATH": str(vllm_ascend)} | variables
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == ((1, "") if stopped else (0, "started\n"))


def test_excepthook_does_not_change_other_errors():
    hook = "import ascend_cli.diagnostics.excepthook; ascend_cli.diagnostics.excepthook.install()\n"
    other = (
        "raise RuntimeError('x') from ImportError('libother.so: cannot open shared object file')"
    )
    done = subprocess.run(
        [sys.executable, "-c", hook + other], capture_output=True, text=True, timeout=60
    )
    assert "Traceback" in done.stderr
    assert "libother.so" in done.stderr


def test_excepthook_is_installed_for_vllm_commands_only():
    script = "import sys; print(sys.excepthook is sys.__excepthook__)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "True"
