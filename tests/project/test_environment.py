# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The environment that tools/environment makes: versions, no CUDA packages, compiled libraries that
are offered, nothing to do the second time."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ascend_emulator import build
from harness import checkout

EXPLAINED = {
    # xgrammar 0.2.8 imports Triton only in its Triton kernel, which it selects only for CUDA
    # tensors (xgrammar/matcher.py).
    "xgrammar 0.2.8 requires triton, which is not installed.",
}


def test_pip_check_reports_only_what_is_explained() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False
    )
    assert set(done.stdout.splitlines()) == EXPLAINED


def test_no_cuda_package_is_installed() -> None:
    excluded = (checkout.TOOLS / "environment" / "excluded.txt").read_text().splitlines()
    left_out = {line for line in excluded if not line.startswith("#")}
    installed = {distribution.name.lower() for distribution in importlib.metadata.distributions()}
    assert {
        name for name in installed if name in left_out or name.startswith(("nvidia-", "cuda-"))
    } == set()


def test_installed_versions_are_the_pinned_ones() -> None:
    pins = re.findall(
        r"^([\w.-]+)==([\w.]+)(?: ;.*)?$", checkout.REQUIREMENTS.read_text(), re.MULTILINE
    )
    assert len(pins) > 100
    wrong = {}
    for name, version in pins:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # its marker excludes this platform
        if installed.partition("+")[0] not in [pin for other, pin in pins if other == name]:
            wrong[name] = (installed, version)
    assert wrong == {}


def test_vllm_is_built_without_kernels_and_torch_for_the_cpu() -> None:
    assert importlib.metadata.version("vllm").endswith("+empty")
    assert "nvidia" not in " ".join(importlib.metadata.requires("torch") or [])


def test_second_set_up_has_nothing_to_do() -> None:
    script = "import environment; environment.prepare()"
    checkout.run_tool(script)
    assert checkout.run_tool(script) == ""


def test_set_up_takes_the_emulators_libraries_from_find_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered, venv = tmp_path / "offered", tmp_path / "venv"
    subprocess.run([sys.executable, checkout.TOOLS / "libs", offered], check=True)
    install = f"""
import environment
from pathlib import Path
environment.create(Path({str(venv)!r}))
environment.PYTHON = Path({str(venv / "bin" / "python")!r})
environment.install_emulator_libs()
"""
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))  # none here
    checkout.run_tool(install)
    assert not list(venv.rglob("ascend_emulator_libs"))
    monkeypatch.setenv("UV_FIND_LINKS", str(offered))
    checkout.run_tool(install)
    (libraries,) = venv.rglob("ascend_emulator_libs")
    assert (libraries / build.prebuilt_name() / "libascendcl.so").exists()
