# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A hook of mkdocs: Mermaid diagrams of the pages as inline SVG, and reports that are not searched.

GitHub renders the same text by itself. On the site no script is loaded, and the colours are those
of the page, dark or light. Two types of diagrams are known: `sequenceDiagram`, with messages, notes
and loops; and `flowchart TB` of subgraphs, which become rows of boxes. Both are 400 units wide, so
that their text can be read on a telephone.
"""

from __future__ import annotations

import html
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

WIDTH = 400
LINE = 13
"""Height of a line of text of 11 units."""
CHARACTER = 6.1
"""Width of a character, on average."""

FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARTICIPANT = re.compile(r"participant (\w+)(?: as (.+))?")
MESSAGE = re.compile(r"(\w+)\s*(--?>>)\s*(\w+)\s*:\s*(.+)")
NOTE = re.compile(r"Note over (\w+)(?:,\s*(\w+))?\s*:\s*(.+)")
SUBGRAPH = re.compile(r'subgraph (\w+)\["(.+)"\]')
NODE = re.compile(r'\w+\["(.+)"\]')
EDGE = re.compile(r'(\w+) -->(?:\|"(.+)"\|)? (\w+)')


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    """Called by mkdocs for each page."""
    if page.file.src_uri in config.extra["not_searched"]:
        page.meta["search"] = {"exclude": True}
    return FENCE.sub(lambda match: render(match[1]), markdown)


def render(text: str) -> str:
    """The diagram as a block of HTML, without an empty line.

    Raises:
        ValueError: a line that is none of the supported subset.
    """
    title, lines = "", [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("%%")]
    kind, *lines = lines
    if lines and lines[0].startswith("accTitle:"):
        title = lines.pop(0).partition(":")[2].strip()
    if kind == "sequenceDiagram":
        shapes, height = _sequence(lines)
    elif kind == "flowchart TB":
        shapes, height = _rows(lines)
    else:
        raise ValueError(f"diagram {kind!r} is unknown; fix: use sequenceDiagram or flowchart TB")
    return (
        f'<div class="diagram"><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
        f"<title>{html.escape(title)}</title>{''.join(shapes)}</svg></div>"
    )


def _wrap(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, max(8, int(width / CHARACTER)), break_long_words=False) or [""]


def _text(lines: list[str], x: float, y: float, anchor: str = "middle", style: str = "") -> str:
    """Lines of text, the first one's baseline at y."""
    spans = "".join(
        f'<tspan x="{x:.0f}" y="{y + LINE * index:.0f}">{html.escape(line)}</tspan>'
        for index, line in enumerate(lines)
    )
    return f'<text class="{style}" text-anchor="{anchor}">{spans}</text>'


def _box(x: float, y: float, width: float, height: float, style: str) -> str:
    return (
        f'<rect class="{style}" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}"'
        f' height="{height:.0f}" rx="4"/>'
    )


def _arrow(x: float, y: float, to_x: float, to_y: float, dashed: bool = False) -> str:
    """A line with a head at its end, horizontal or vertical."""
    if y == to_y:
        back = -6 if to_x > x else 6
        head = (
            f"M{to_x + back:.0f} {y - 3.5:.1f}L{to_x:.0f} {y:.0f}L{to_x + back:.0f} {y + 3.5:.1f}"
        )
    else:
        head = f"M{x - 3.5:.1f} {to_y - 6:.0f}L{x:.0f} {to_y:.0f}L{x + 3.5:.1f} {to_y - 6:.0f}"
    style = "arrow dashed" if dashed else "arrow"
    return (
        f'<path class="{style}" d="M{x:.0f} {y:.0f}L{to_x:.0f} {to_y:.0f}"/>'
        f'<path class="arrow" d="{head}"/>'
    )


@dataclass
class _Sequence:
    columns: dict[str, float]
    shapes: list[str]
    y: float
    number: int = 0
    loops: list[tuple[float, str]] = field(default_factory=list)

    def message(self, source: str, arrow: str, target: str, text: str) -> None:
        self.number += 1
        x, to_x = self.columns[source], self.columns[target]
        dashed, text = arrow == "-->>", f"{self.number}. {text}"
        if x == to_x:
            return self._own(x, text)
        lines = _wrap(text, max(abs(to_x - x) - 8, 150))
        half = max(map(len, lines)) * CHARACTER / 2
        centre = min(max((x + to_x) / 2, half + 4), WIDTH - half - 4)
        self.shapes.append(_text(lines, centre, self.y + LINE, style="label"))
        self.y += LINE * len(lines) + 6
        self.shapes.append(_arrow(x, self.y, to_x, self.y, dashed))
        self.y += 6
        return None

    def _own(self, x: float, text: str) -> None:
        """A step of one participant, beside its line where there is more space."""
        right = x < WIDTH / 2
        lines = _wrap(text, (WIDTH - x if right else x) - 16)
        side = 1 if right else -1
        height = LINE * len(lines)
        self.shapes.append(_box(x - 3, self.y + 4, 6, height, "step"))
        anchor = "start" if right else "end"
        self.shapes.append(_text(lines, x + side * 8, self.y + LINE, anchor, "label"))
        self.y += height + 8

    def note(self, first: str, last: str, text: str) -> None:
        x, to_x = sorted((self.columns[first], self.columns[last]))
        lines = _wrap(text, max(to_x - x + 60, 150) - 12)
        width = max(map(len, lines)) * CHARACTER + 16
        left = min(max((x + to_x - width) / 2, 2), WIDTH - width - 2)
        height = LINE * len(lines) + 8
        self.shapes.append(_box(left, self.y + 4, width, height, "note"))
        self.shapes.append(_text(lines, left + width / 2, self.y + 4 + LINE))
        self.y += height + 10

    def begin(self, text: str) -> None:
        self.loops.append((self.y + 2, text))
        self.shapes.append(_text([text], 8, self.y + 14, "start", "title"))
        self.y += 18

    def end(self) -> None:
        top, _ = self.loops.pop()
        self.shapes.insert(0, _box(1, top, WIDTH - 2, self.y - top + 4, "loop"))
        self.y += 8


def _sequence(lines: list[str]) -> tuple[list[str], float]:
    names = {
        match[1]: match[2] or match[1] for line in lines if (match := PARTICIPANT.fullmatch(line))
    }
    step = WIDTH / len(names)
    state = _Sequence({name: step * (index + 0.5) for index, name in enumerate(names)}, [], 0)
    heads = {name: _wrap(label, step - 24) for name, label in names.items()}
    height = LINE * max(map(len, heads.values())) + 8
    for name, x in state.columns.items():
        state.shapes.append(_box(x - step / 2 + 2, 1, step - 4, height, "box"))
        offset = (height - LINE * len(heads[name])) / 2
        state.shapes.append(_text(heads[name], x, offset + LINE - 1, style="title"))
    state.y = height + 6
    for line in lines:
        if match := MESSAGE.fullmatch(line):
            state.message(*match.groups())
        elif match := NOTE.fullmatch(line):
            state.note(match[1], match[2] or match[1], match[3])
        elif line.startswith(("loop ", "opt ")):
            state.begin(line.partition(" ")[2])
        elif line == "end":
            state.end()
        elif line != "autonumber" and not line.startswith("participant "):
            raise ValueError(f"line {line!r} of a sequence diagram is not understood")
    lifelines = [
        f'<path class="line" d="M{x:.0f} {height + 1:.0f}V{state.y:.0f}"/>'
        for x in state.columns.values()
    ]
    return [*lifelines, *state.shapes], state.y + 2


def _rows(lines: list[str]) -> tuple[list[str], float]:
    """Subgraphs from top to bottom; those with the same source are side by side."""
    titles: dict[str, str] = {}
    nodes: dict[str, list[str]] = {}
    sources: dict[str, tuple[str, str]] = {}
    current = ""
    for line in lines:
        if match := SUBGRAPH.fullmatch(line):
            current = match[1]
            titles[current], nodes[current] = match[2], []
        elif match := NODE.fullmatch(line):
            nodes[current].append(match[1])
        elif match := EDGE.fullmatch(line):
            sources[match[3]] = (match[1], match[2] or "")
        elif line != "end":
            raise ValueError(f"line {line!r} of a flowchart is not understood")
    rows: list[list[str]] = []
    for name in titles:
        if rows and name in sources and sources.get(rows[-1][0]) == sources[name]:
            rows[-1].append(name)
        else:
            rows.append([name])
    shapes: list[str] = []
    y = 1.0
    for index, row in enumerate(rows):
        if index:
            label = _wrap(sources.get(row[0], ("", ""))[1], WIDTH / 2 - 20)
            height = max(LINE * len(label), LINE) + 8.0
            for position in range(len(row)):
                x = WIDTH * (position + 0.5) / len(row)
                shapes.append(_arrow(x, y, x, y + height))
            beside = WIDTH / 2 + (8 if len(row) == 1 else 0)
            anchor = "start" if len(row) == 1 else "middle"
            shapes.append(_text(label, beside, y + LINE + 2, anchor, "label"))
            y += height + 1
        width = WIDTH / len(row)
        drawn = [_group(titles[name], nodes[name], width - 4) for name in row]
        height = max(size for _, size in drawn)
        for position, (parts, _) in enumerate(drawn):
            left = position * width + 2
            shapes.append(_box(left, y, width - 4, height, "group"))
            shapes.append(f'<g transform="translate({left:.0f} {y:.0f})">{"".join(parts)}</g>')
        y += height
    return shapes, y + 2


def _group(title: str, labels: list[str], width: float) -> tuple[list[str], float]:
    """A title above a grid of boxes."""
    heading = _wrap(title, width - 12)
    shapes = [_text(heading, 8, LINE + 1, "start", "title")]
    y = LINE * len(heading) + 7.0
    per_row = max(1, min(len(labels), 3 if width > WIDTH / 2 else 1))
    cell = (width - 8) / per_row
    for start in range(0, len(labels), per_row):
        texts = [_wrap(label, cell - 10) for label in labels[start : start + per_row]]
        height = LINE * max(map(len, texts)) + 8
        for index, text in enumerate(texts):
            x = 4 + cell * index
            shapes.append(_box(x + 2, y, cell - 4, height, "box"))
            offset = (height - LINE * len(text)) / 2
            shapes.append(_text(text, x + cell / 2, y + offset + LINE - 2.5))
        y += height + 5
    return shapes, y + 3
