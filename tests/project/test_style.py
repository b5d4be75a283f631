"""Style and types of the whole checkout, as ruff and mypy see them."""

import subprocess
import sys

import pytest
from harness import checkout


def check(*command: object) -> None:
    """Run a command in the checkout; its output is the failure."""
    done = subprocess.run(list(map(str, command)), cwd=checkout.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=lambda arguments: arguments[0])
def test_ruff(arguments: tuple[str, ...]) -> None:
    check(sys.executable, "-m", "ruff", *arguments, ".")


@pytest.mark.slow
def test_mypy() -> None:
    """Strict, of the packages, the tools and the tests' harness and programs: about a minute without .mypy_cache."""
    check(sys.executable, "-m", "mypy")


def test_every_command_is_checked() -> None:
    """Files without a suffix are found by their names alone, in the lists of ruff and mypy."""
    commands = {path for path in (checkout.ROOT / "tools").iterdir() if path.is_file() and not path.suffix}
    assert {path.name for path in commands} >= {"test", "release", "docs-tables"}
    text = (checkout.ROOT / "pyproject.toml").read_text()
    assert [path.name for path in commands if text.count(f'"tools/{path.name}",') != 2] == []
