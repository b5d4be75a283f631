# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Reviewed decisions of docs/decisions.md against the code: the names of each row are there, or
nowhere."""

import re
from pathlib import Path

import pytest
from harness import checkout

PAGE = (checkout.ROOT / "docs" / "decisions.md").read_text()
SECTION = PAGE.partition("## Reviewed and kept")[2].partition("\n## ")[0]
ROWS = [" ".join(row.split()) for row in SECTION.split("\n- ")[1:]]
SOURCES = {
    str(path.relative_to(package)): path
    for package in sorted(checkout.ROOT.glob("packages/*/src"))
    if package.parent.name != "ascend-emulator"
    for path in sorted(package.rglob("*.py"))
}


def texts() -> dict[str, str]:
    return {name: path.read_text() for name, path in SOURCES.items()}


def errors(row: str, sources: dict[str, str]) -> list[str]:
    """Names that follow "Code: " in a row and are not, or must not be, in the sources."""
    _, marker, code = row.partition(" Code: ")
    here, _, absent = code.partition("none has ")
    named, without = re.findall(r"`(.+?)::(.+?)`", here), re.findall(r"`(.+?)`", absent)
    if not marker or not named + without:
        return ["no code is named"]
    wrong = [
        f"{name} has no {part}"
        for name, part in named
        if part not in sources.get(Path(name).as_posix(), "")
    ]
    for part in without:
        wrong += [f"{name} has {part}" for name, text in sources.items() if is_called(part, text)]
    return wrong


def is_called(name: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[:60])
def test_code_of_a_row_is_there(row: str) -> None:
    assert errors(row, texts()) == []


def test_a_row_that_lies_is_found() -> None:
    sources = {"a/b.py": "torch_npu.npu_one(x)"}
    assert len(ROWS) >= 25
    assert errors("**x**: y. Code: `a/b.py::npu_one`; none has `npu_two`.", sources) == []
    assert errors("**x**: y. Code: `a/b.py::npu_two`.", sources) == ["a/b.py has no npu_two"]
    assert errors("**x**: y. Code: `a/c.py::npu_one`.", sources) == ["a/c.py has no npu_one"]
    assert errors("**x**: y. Code: none has `npu_one`.", sources) == ["a/b.py has npu_one"]
    assert errors("**x**: y.", sources) == ["no code is named"]
