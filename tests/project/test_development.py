# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The list "Where a change goes" of docs/development.md: its files exist, and have its names."""

import re
from pathlib import Path

import pytest
from harness import checkout

PAGE = checkout.ROOT / "docs" / "development.md"
PLATFORM = checkout.ROOT / "packages" / "ascend-platform" / "src" / "ascend_platform"
ROW = re.compile(r"^- \*\*([^*]+)\*\*: (.*?)\. Test: `([^`]+)`\.$", re.MULTILINE)
FILE = re.compile(r"(?:`(\w+)` in )?`([\w.-]*(?:/[\w.-]+)+|\w+\.\w+)`")


def rows() -> dict[str, tuple[str, str]]:
    section = PAGE.read_text().partition("## Where a change goes")[2].partition("\n## ")[0]
    items = section.replace("\n  ", " ")
    return {change: (files, test) for change, files, test in ROW.findall(items)}


def matching(path: str) -> list[Path]:
    """The files of a path, in which NAME stands for any name."""
    top = checkout.ROOT if re.match("(docs|packages|tools|tests)/", path) else PLATFORM
    return [*top.glob(path.replace("NAME", "*"))]


def test_every_row_is_read() -> None:
    assert len(rows()) == 14


@pytest.mark.parametrize("change", rows())
def test_files_of_a_change_exist_and_have_its_names(change: str) -> None:
    files, test = rows()[change]
    named = FILE.findall(files)
    assert 1 <= len(named) <= 4
    assert [path for _, path in [*named, ("", test)] if not matching(path)] == []
    for name, path in named:
        assert all(name in match.read_text() for match in matching(path)), f"{path}: no {name}"
