# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Clones of the checkout for the tests of releases."""

import shutil
import subprocess
from pathlib import Path

import pytest
from harness import checkout
from harness.project.clones import ATTENTION, PLATFORM, Clone, cloned, dependents, written


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone of the checkout with its uncommitted changes. Each package has version 0.1.2 and
    releases before that."""
    clone = cloned(checkout.ROOT, tmp_path_factory.mktemp("source") / "clone", "--no-tags")
    listing = ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    changed = subprocess.run(
        listing, cwd=checkout.ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, changed.split("\0")):
        (clone.root / name).unlink(missing_ok=True)
        if (checkout.ROOT / name).is_file():
            (clone.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkout.ROOT / name, clone.root / name)
    for name in clone.packages:
        clone.set_version(name, "0.1.2")
        shutil.rmtree(clone.path(name, "changes"), ignore_errors=True)
    for name in dependents(clone):
        clone.edit(clone.path(name), written(clone, name, PLATFORM), f"{PLATFORM}>=0.1,<0.2")
    clone.fragment(ATTENTION, "computes attention faster.", "12.added.md")
    clone.fragment(ATTENTION, "rounds as it should.")
    clone.fragment(PLATFORM, "starts sooner.")
    clone.commit()
    for name in clone.packages:
        for version in ("0.1.0", "0.1.1"):
            clone.git("tag", f"{name}-v{version}")
    return clone


@pytest.fixture
def clone(source: Clone, tmp_path: Path) -> Clone:
    return cloned(source.root, tmp_path / "clone")
