# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Style and types of the whole checkout, as ruff, mypy and the linters of workflows, shell and
Docker see them."""

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from harness import checkout

HOOKS = yaml.safe_load((checkout.ROOT / ".pre-commit-config.yaml").read_text())
SPDX = (
    "SPDX-License-Identifier: Apache-2.0",
    "SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project",
)
FIRST = "40cbdaf0"
"""Subjects of later commits have the form that the hook `commit-subject` checks."""


def git(*arguments: object, cwd: Path = checkout.ROOT) -> str:
    command = ["git", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def tracked() -> list[Path]:
    files = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [path for name in files if (path := checkout.ROOT / name).is_file()]


def hooks() -> Iterator[dict]:
    return (hook for repository in HOOKS["repos"] for hook in repository["hooks"])


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
    """ruff and mypy find files without a suffix only by the names in their lists."""
    commands = {
        path for path in (checkout.ROOT / "tools").iterdir() if path.is_file() and not path.suffix
    }
    assert {path.name for path in commands} >= {"test", "release", "docs-tables"}
    text = (checkout.ROOT / "pyproject.toml").read_text()
    assert [path.name for path in commands if text.count(f'"tools/{path.name}",') != 2] == []


@pytest.mark.parametrize(
    "command",
    [
        ("actionlint",),
        ("hadolint", "Dockerfile"),
        ("shellcheck", ".ci/run"),
        ("zizmor", "--offline", "--quiet", ".github/workflows"),
    ],
    ids=lambda command: command[0],
)
def test_workflows_dockerfile_and_shell(command: tuple[str, ...]) -> None:
    program = shutil.which(command[0], path=Path(sys.executable).parent)
    if program is None and platform.machine() != "x86_64":
        pytest.skip(f"no wheel of {command[0]} for {platform.machine()}")
    assert program, f"{command[0]} is not in {Path(sys.executable).parent}"
    check(program, *command[1:])


def test_every_source_file_has_a_licence_notice() -> None:
    sources = [
        path
        for path in tracked()
        if path.suffix in {".py", ".cpp", ".h", ".inc"} or path.read_bytes().startswith(b"#!")
    ]
    assert len(sources) > 500
    assert [
        path for path in sources if not all(line in path.read_text()[:400] for line in SPDX)
    ] == []


def test_spelling() -> None:
    check(sys.executable, "-m", "codespell_lib", *tracked())


def test_prose() -> None:
    """English usage on pages and changelogs; the words of the style guide are in
    test_language.py."""
    pages = [path for path in tracked() if path.suffix == ".md" and path.parent.name != "zh"]
    assert len(pages) > 100
    check(Path(sys.executable).with_name("proselint"), "check", *pages)


def test_hooks_run_programs_of_the_environment() -> None:
    check(sys.executable, "-m", "pre_commit", "validate-config")
    commands = [hook["entry"].split()[0] for hook in hooks() if hook["language"] == "system"]
    assert {Path(command).name for command in commands} >= {"ruff", "mypy", "codespell"}
    assert {Path(command).parent for command in commands} == {Path(".venv/bin")}
    names = {Path(command).name for command in commands}
    if platform.machine() != "x86_64":
        names.discard("actionlint")
    assert [name for name in names if not Path(sys.executable).with_name(name).exists()] == []


def subjects(root: Path) -> list[str]:
    """Subjects of the commits after FIRST; of all where a shallow clone does not have it."""
    since = (
        f"{FIRST}..HEAD"
        if git("rev-parse", "--quiet", "--verify", f"{FIRST}^{{commit}}", cwd=root)
        else "HEAD"
    )
    return git("log", "--no-merges", "--format=%s", since, cwd=root).splitlines()


def test_subjects_of_commits(tmp_path: Path) -> None:
    entry = next(hook["entry"] for hook in hooks() if hook["id"] == "commit-subject")
    form = re.compile(entry, re.MULTILINE | re.DOTALL)  # as pre-commit reads it
    wrong = ("Fix it", "docs: Fix it", "docs: fixed it", "docs: fix it.", "docs: fix; and more")
    assert [subject for subject in (*wrong, f"docs: {'a' * 70}") if form.search(subject)] == []
    assert form.search("harness: move out of tests/ with its programs\n\nThe why; in the body.\n")
    git("clone", "--depth", "2", f"file://{checkout.ROOT}", tmp_path / "shallow", cwd=tmp_path)
    for root in (checkout.ROOT, tmp_path / "shallow"):
        assert [subject for subject in subjects(root) if not form.search(subject)] == []
    assert len(subjects(tmp_path / "shallow")) == 2
