# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Style and types of the whole checkout, as ruff, mypy and the linters of workflows, shell and
Docker see them."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import checkout


def check(*command: object) -> None:
    """Run a command in the checkout; its output is the failure."""
    done = subprocess.run(
        list(map(str, command)), cwd=checkout.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "arguments", [("check",), ("format", "--check")], ids=lambda arguments: arguments[0]
)
def test_ruff(arguments: tuple[str, ...]) -> None:
    check(sys.executable, "-m", "ruff", *arguments, ".")


@pytest.mark.slow
def test_mypy() -> None:
    """Strict, of the packages, the tools and the tests' harness and programs: about a minute
    without .mypy_cache."""
    check(sys.executable, "-m", "mypy")


@pytest.mark.slow
def test_emulator_is_checked_as_python_3_10() -> None:
    """The standard library's names too, which a newer Python would have."""
    check(
        sys.executable,
        "-m",
        "mypy",
        "--python-version",
        "3.10",
        "packages/ascend-emulator/src/ascend_emulator",
    )


def test_every_command_is_checked() -> None:
    """Files without a suffix are found by their names alone, in the lists of ruff and mypy."""
    commands = {
        path for path in (checkout.ROOT / "tools").iterdir() if path.is_file() and not path.suffix
    }
    assert {path.name for path in commands} >= {"test", "release", "docs-tables"}
    text = (checkout.ROOT / "pyproject.toml").read_text()
    assert [path.name for path in commands if text.count(f'"tools/{path.name}",') != 2] == []


@pytest.mark.parametrize(
    "command",
    [("actionlint",), ("hadolint", "Dockerfile"), ("shellcheck", ".ci/run")],
    ids=lambda command: command[0],
)
def test_workflows_dockerfile_and_shell(command: tuple[str, ...]) -> None:
    program = shutil.which(command[0], path=Path(sys.executable).parent)
    if program is None and platform.machine() != "x86_64":
        pytest.skip(f"no wheel of {command[0]} for {platform.machine()}")
    assert program, f"{command[0]} is not in {Path(sys.executable).parent}"
    check(program, *command[1:])
