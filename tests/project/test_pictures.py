# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Pictures of the pages: readable on telephones and on dark pages, and marked where modelled."""

import re
from pathlib import Path
from typing import Any

import pytest
from harness import checkout

DOCS = checkout.ROOT / "docs"
PICTURES = sorted(DOCS.glob("*.svg"))
PAGES = "".join(page.read_text() for page in DOCS.rglob("*.md"))
WIDEST, SMALLEST = 400, 11
"""Units of a picture and of its text, which are pixels on a telephone."""


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_picture_is_readable_on_a_telephone_and_on_a_dark_page(picture: Path) -> None:
    text = picture.read_text()
    (width,) = re.findall(r'viewBox="0 0 (\d+) ', text)
    assert int(width) <= WIDEST
    assert min(map(int, re.findall(r'font-size="(\d+)"', text))) >= SMALLEST
    assert '<rect width="100%" height="100%" fill="#fff"/>' in text


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_picture_is_on_a_page_and_marked_if_modelled(picture: Path) -> None:
    (description,) = re.findall(rf"!\[([^\]]+)\]\((?:\.\./)?{re.escape(picture.name)}\)", PAGES)
    assert ("modelled" in description.lower()) == ("modelled" in picture.read_text())


def test_host_times_of_the_picture_are_those_of_the_report() -> None:
    steps: Any = checkout.import_tool("benchmarks.steps")
    times = steps.host_times((DOCS / "reports" / "host-time.md").read_text())
    assert list(times) == [1, 32, 256]
    assert all(len(sides) == 2 for sides in times.values())
    assert steps.host_times(
        "| --- |\n| decode | 8 | 3.5 | 1.5 | 0.4 |\n\n| decode | 9 | 1 | 2 |"
    ) == {8: {"host, eager: measured": 3.5, "host, graph: measured": 1.5}}
