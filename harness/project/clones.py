# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scratch clones of the checkout, in which a test releases packages."""

import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

META, ATTENTION, PLATFORM = "vllm-ascend-all", "ascend-attention", "ascend-platform"


@dataclass
class Clone:
    root: Path

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=self.root, capture_output=True, text=True, check=True
        ).stdout.strip()

    def release(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "tools/release", *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)

    def path(self, name: str, file: str = "pyproject.toml") -> Path:
        return self.root / "packages" / name / file

    def project(self, name: str) -> dict:
        return tomllib.loads(self.path(name).read_text())["project"]

    def version(self, name: str) -> str:
        return self.project(name)["version"]

    def edit(self, path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def set_version(self, name: str, version: str) -> None:
        self.edit(self.path(name), f'version = "{self.version(name)}"', f'version = "{version}"')

    def fragment(self, name: str, text: str, file: str = "7.fixed.md") -> None:
        path = self.path(name, "changes") / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")

    def commit(self) -> None:
        subprocess.run([sys.executable, "tools/versions/pin_meta.py"], cwd=self.root, check=True)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "the state that a test needs")

    def state(self) -> tuple[str, ...]:
        """The state that a refused release must leave unchanged."""
        return tuple(
            self.git(*command.split())
            for command in ("show-ref --head", "status --porcelain", "worktree list")
        )

    @property
    def packages(self) -> list[str]:
        return sorted(path.parent.name for path in self.root.glob("packages/*/pyproject.toml"))


def cloned(source: Path, target: Path, *options: str) -> Clone:
    subprocess.run(["git", "clone", "--quiet", *options, source, target], check=True)
    clone = Clone(target)
    for key, value in {
        "user.name": "A Tester",
        "user.email": "tester@example.org",
        "commit.gpgsign": "false",
    }.items():
        clone.git("config", key, value)
    return clone


def dependents(clone: Clone) -> list[str]:
    """The packages whose range of the platform is written by hand."""
    return [
        name
        for name in clone.packages
        if name != META and PLATFORM in str(clone.project(name)["dependencies"])
    ]


def written(clone: Clone, name: str, other: str) -> str:
    """The requirement as it is written."""
    return next(
        text for text in clone.project(name)["dependencies"] if Requirement(text).name == other
    )
