# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Pages for users: their purpose first, cells of tables short, evidence on report pages."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import checkout

DOCS = checkout.ROOT / "docs"
LONGEST_CELL = 120  # A cell of a generated table may be a third longer.
REGION = re.compile(r"<!-- begin: (\S+) -->\n(.*?)<!-- end: \1 -->", re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n\n", re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
HISTORY = re.compile(r"\b(?:was|were) measured\b|\b20\d\d-\d\d-\d\d\b|\ban? earlier run\b")
# Results by published figure, which readers search.
RESULTS = {"modelled-times.md"}


def page_name(path: Path) -> str:
    return str(path.relative_to(DOCS))


def reports() -> set[str]:
    """Pages outside of the search index, which are all those of the folder reports."""
    settings = (checkout.ROOT / "mkdocs.yml").read_text()
    listed = settings.partition("not_searched:")[2].partition("\nvalidation:")[0]
    return set(re.findall(r"^    - (reports/\S+\.md)$", listed, re.MULTILINE))


PAGES = sorted(path for path in DOCS.rglob("*.md") if page_name(path) not in reports() | RESULTS)


def cells(text: str) -> Iterator[str]:
    """Cells of the tables, without addresses of links; a cell that is one piece of code, such as
    an error message, cannot be shorter."""
    for line in text.splitlines():
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]:
                if not re.fullmatch(r"`[^`]*`", cell.strip()):
                    yield LINK.sub(r"\1", cell.strip())


@pytest.fixture(params=PAGES, ids=page_name)
def page(request: pytest.FixtureRequest) -> str:
    return FRONT_MATTER.sub("", request.param.read_text())


def test_reports_exist_and_are_found_from_other_pages() -> None:
    assert reports() == {page_name(path) for path in DOCS.glob("reports/*.md")}
    assert len(reports()) > 10
    linked = {name for path in PAGES for name in re.findall(r"\]\(([\w/-]+\.md)", path.read_text())}
    assert reports() - linked == set()


def test_page_begins_with_its_purpose(page: str) -> None:
    title, first = page.split("\n\n", 2)[:2]
    assert title.startswith("# ")
    assert re.match(r"[\w`\[]", first), first


def test_cells_of_tables_are_short(page: str) -> None:
    by_hand = [cell for cell in cells(REGION.sub("", page)) if len(cell) > LONGEST_CELL]
    generated = "\n".join(region for _, region in REGION.findall(page))
    long = [cell for cell in cells(generated) if len(cell) > LONGEST_CELL * 4 // 3]
    assert by_hand + long == []


def test_sentences_have_no_history_of_the_work(page: str) -> None:
    lines = FENCE.sub("", REGION.sub("", page)).splitlines()
    assert [line for line in lines if not line.startswith("|") and HISTORY.search(line)] == []


def test_page_links_one_report_of_its_tests(page: str) -> None:
    assert page.count("How it was tested:") <= 1
