# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Chinese pages: the commands and headings of their originals, and whether they are behind."""

import re
from pathlib import Path
from typing import Any

import pytest
from harness import checkout

CHINESE = checkout.ROOT / "docs" / "zh"
PAGES = [*sorted(CHINESE.glob("*.md")), checkout.ROOT / "README.zh.md"]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ORIGINAL = re.compile(r"^(?:<!-- )?original: ([\da-f]{40})(?: -->)?$", re.MULTILINE)
BEHIND = re.compile(r"^(?:<!-- )?behind: true(?: -->)?$", re.MULTILINE)


@pytest.fixture(scope="module")
def tool() -> Any:
    return checkout.import_tool("generated_docs.translations")


def original_of(page: Path) -> Path:
    if page.parent == CHINESE:
        return CHINESE.parent / page.name
    return checkout.ROOT / "README.md"


def levels(text: str) -> list[str]:
    return re.findall(r"^#+(?= )", FENCE.sub("", text), re.MULTILINE)


def test_pages_for_newcomers_are_translated() -> None:
    names = {page.stem for page in PAGES}
    assert names >= {"README.zh", "index", "installation", "quick-start", "troubleshooting"}
    assert names >= {"migration", "tutorial-several-npus"}
    assert names >= {"tutorial-several-machines", "kv-connector"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_translation_has_commands_and_headings_of_its_original(page: Path) -> None:
    original, text = original_of(page).read_text(), page.read_text()
    assert FENCE.findall(text) == FENCE.findall(original)
    assert levels(text) == levels(original)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_translation_that_is_behind_its_original_is_marked(page: Path, tool: Any) -> None:
    """The site shows a note on a page that is behind."""
    text, current = page.read_text(), tool.object_id(original_of(page))
    of = ORIGINAL.findall(text)
    assert len(of) == 1
    assert of == [current] or BEHIND.search(text), (
        f"{page.name} is behind its original; fix: translate what has changed and write"
        f" `original: {current}`, or add the line `behind: true`"
    )


def test_anchors_of_an_original(tool: Any) -> None:
    text = "# Title\n\n## A `b` [c](d.md)\n\n```\n## no heading\n```\n\n### a b c\n"
    assert tool.anchors(text) == ["a-b-c", "a-b-c_1"]
