# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Pictures of the pages: readable on telephones and on dark pages, and marked where modelled."""

import re
from pathlib import Path
from typing import Any

import pytest
from harness import checkout

DOCS = checkout.ROOT / "docs"
DIAGRAMS = sorted(DOCS.glob("diagrams/*.mmd"))
PICTURES = sorted([*DOCS.glob("*.svg"), *DOCS.glob("diagrams/*.svg")])
PAGES = "".join(page.read_text() for page in DOCS.rglob("*.md"))
TELEPHONE, SMALLEST = 400, 10.5
"""Width of a page, and height of text that can be read, in pixels."""
WHITE = re.compile(r"<svg[^>]*background-color: white|<g id=\"patch_1\">\s*<path[^>]*fill: #ffffff")
SYNTAX = {
    "Note",
    "accTitle",
    "autonumber",
    "end",
    "flowchart",
    "loop",
    "over",
    "participant",
    "sequenceDiagram",
}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_picture_is_readable_on_a_telephone_and_on_a_dark_page(picture: Path) -> None:
    text = picture.read_text()
    width, *_ = re.findall(r'viewBox="\S+ \S+ ([\d.]+) ', text)
    # Only the text of elements counts: a style sheet has rules for elements that are not there.
    sizes = re.findall(r'style="[^"]*font(?:-size)?: ?(?:bold )?([\d.]+)px', text)
    sizes += re.findall(r"#my-svg\{[^}]*font-size:([\d.]+)px", text)  # Mermaid's, of all elements
    assert min(map(float, sizes)) * min(1, TELEPHONE / float(width)) >= SMALLEST
    assert WHITE.search(text)


@pytest.mark.parametrize("source", DIAGRAMS, ids=lambda source: source.stem)
def test_diagram_has_the_words_of_its_source(source: Path) -> None:
    """Mermaid divides lines."""
    picture = source.with_suffix(".svg").read_text()
    text = re.sub(r"<style>.*?</style>", "", picture, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>|&\w+;|\W", "", text)
    words = set(re.findall(r"\w{3,}", source.read_text())) - SYNTAX
    missing = [word for word in words if word not in text]
    assert missing == [], f"{source.name}: draw it again, see docs/development.md#diagrams"


def test_plot_has_a_point_for_each_batch_size_and_side() -> None:
    plot: Any = checkout.import_tool("benchmarks.plot")
    runs = {f"decode {size}": {"ours": [size, size + 1.0], "theirs": [3.0]} for size in (1, 8)}
    picture = plot.svg(runs, "decode", "ms")
    labels = set(re.findall(r"<text[^>]*>([^<]+)</text>", picture))
    assert {"1", "8", "ours", "theirs", "decode, ms (median, lowest and highest)"} <= labels
    assert plot.svg(runs, "decode", "ms") == picture


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_picture_is_on_a_page_and_marked_if_modelled(picture: Path) -> None:
    (description,) = re.findall(
        rf"!\[([^\]]+)\]\((?:\.\./|diagrams/)?{re.escape(picture.name)}\)", PAGES
    )
    assert ("modelled" in description.lower()) == ("modelled" in picture.read_text())


def test_host_times_of_the_picture_are_those_of_the_report() -> None:
    steps: Any = checkout.import_tool("benchmarks.steps")
    times = steps.host_times((DOCS / "reports" / "host-time.md").read_text())
    assert list(times) == [1, 32, 256]
    assert all(len(sides) == 2 for sides in times.values())
    assert steps.host_times(
        "| --- |\n| decode | 8 | 3.5 | 1.5 | 0.4 |\n\n| decode | 9 | 1 | 2 |"
    ) == {8: {"host, eager: measured": 3.5, "host, graph: measured": 1.5}}
