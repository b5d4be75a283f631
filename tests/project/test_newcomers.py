# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Questions of newcomers have an answer two clicks from the first page."""

import posixpath
import re
import tomllib
from pathlib import Path

import pytest
from harness import checkout

DOCS = checkout.ROOT / "docs"
QUESTIONS = tomllib.loads(Path(__file__).with_name("newcomers.toml").read_text())["question"]
MOST_CLICKS = 2
LINK = re.compile(r"\]\(([\w./-]+\.md)(#[\w-]+)?\)")
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)


def headings(text: str) -> list[tuple[str, str]]:
    """Headings of a page, each with the text down to the next one of its level or above."""
    fenceless = re.sub(
        r"^```.*?^```$", lambda m: re.sub("(?m)^#", " ", m[0]), text, flags=re.M | re.S
    )
    result = list(HEADING.finditer(fenceless))
    sections = []
    for index, match in enumerate(result):
        ends = (each.start() for each in result[index + 1 :] if len(each[1]) <= len(match[1]))
        sections.append((match[2], text[match.end() : next(ends, len(text))]))
    return sections


def clicks(page: str, is_on_top: bool) -> int:
    """Clicks from index.md: links in the text of pages, and one in the page's table of contents."""
    distance, newest = {"index.md": 0}, ["index.md"]
    while newest and page not in distance:
        links = {
            (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), target)),
                distance[name] + 1,
            )
            for name in newest
            for target, _ in LINK.findall((DOCS / name).read_text())
        }
        distance |= {target: count for target, count in links if target not in distance}
        newest = [target for target, _ in links]
    return distance.get(page, 99) + (not is_on_top)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["asks"])
def test_answer_is_two_clicks_away(question: dict[str, str]) -> None:
    sections = headings((DOCS / question["page"]).read_text())
    position = [title for title, _ in sections].index(question["heading"])
    assert question["answer"] in sections[position][1]
    assert clicks(question["page"], position == 0) <= MOST_CLICKS


def test_there_are_ten_questions() -> None:
    assert len({question["asks"] for question in QUESTIONS}) >= 10
