# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The wheel ascend-emulator-libs: found by content, and used without a compiler; without it, or
with another's, a compilation."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ascend_emulator import build

TOOL = Path(__file__).parents[3] / "tools" / "libs"
FIRST = "import torch; print((torch.ones(2, 2).npu() @ torch.ones(2, 2).npu()).tolist())"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not TOOL.exists():
        pytest.skip("tools/libs is of a checkout")
    if os.environ.get("ASCEND_EMULATOR_SANITIZE"):
        pytest.skip("the wheel is built without sanitizers")
    directory = tmp_path_factory.mktemp("libs")
    subprocess.run([sys.executable, TOOL, directory], check=True)
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_license_and_notice_are_in_the_wheel(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for file in ("LICENSE", "NOTICE"):
        assert [name for name in names if name.endswith(f".dist-info/{file}")]


def start(run, site, tmp_path):
    """The first operator in an environment without a compiler and with an empty cache; its output
    and seconds of CPU time."""
    started = os.times()
    environment = {
        "PATH": str(tmp_path),
        "CXX": "",
        "PYTHONPATH": str(site),
        "ASCEND_EMULATOR_CACHE": str(tmp_path / "cache"),
    }
    done = run("run", "--", sys.executable, "-c", FIRST, **environment)
    ended = os.times()
    return (
        done,
        ended.children_user
        - started.children_user
        + ended.children_system
        - started.children_system,
    )


def test_first_operator_without_a_compiler(run, installed, tmp_path):
    assert shutil.which("g++", path=str(tmp_path)) is None
    done, seconds = start(run, installed, tmp_path)
    assert done.stdout == "[[2.0, 2.0], [2.0, 2.0]]\n", done.stderr
    assert "compil" not in done.stderr
    # Most of it is the import of torch and torch_npu; a compilation takes over 200.
    assert seconds < 60
    assert not (tmp_path / "cache").exists()


def test_without_the_wheel_a_compiler_is_asked_for(run, tmp_path):
    done, _ = start(run, tmp_path, tmp_path)
    assert done.returncode == 1
    assert "ascend-emulator needs a C++ compiler and found none" in done.stderr
    assert "ascend-emulator[libs]" in done.stderr


def test_libraries_of_other_sources_are_not_used(run, installed, tmp_path):
    other = tmp_path / "site" / build.PREBUILT
    shutil.copytree(installed / build.PREBUILT, other)
    (other / build.prebuilt_name()).rename(other / "0123456789abcdef")
    done, _ = start(run, other.parent, tmp_path)
    assert done.returncode == 1
    assert (
        "ascend-emulator: ascend-emulator-libs has none for this ascend-emulator and torch"
        in done.stderr
    )


def test_the_wheel_states_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        text = archive.read(metadata).decode()
    assert f"- {', '.join((*build._versions(), os.uname().machine))}" in text
    assert f"_{os.uname().machine}.whl" in wheel.name
    assert "manylinux_2_" in wheel.name
    assert wheel.stat().st_size < 5 << 20
