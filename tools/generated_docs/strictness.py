# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Refusals of the emulator: tables of docs/emulator-behaviour.md and
docs/emulator-rules.md.

Programs come from packages/ascend-emulator/tests/refused, by the lines at their head; operators
from the sources below csrc/ops.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import environment

EMULATOR = environment.ROOT / "packages" / "ascend-emulator"
SOURCES = EMULATOR / "src" / "ascend_emulator" / "csrc"
VERDICTS = Path(__file__).with_name("emulator_verdicts.toml")
HEADER = re.compile(r"^# (refused|source|seen on hardware):[ ]*(.*)$", re.MULTILINE)
CHECK = re.compile(
    r"\b(?:(?:check|require)(?:_emulated)?|one_of|same_dtype|rank|shape|within|multiple|contiguous|chips|SHAPE|SAME|BROADCAST|EXPANDS|ALONG|REDUCED|PRODUCT)\("
    r"|\brule\(\s*\"[\w.-]+\",(?!\s*\[)"
)


def programs() -> list[list[str]]:
    """A program's error, the refusal, the source of the rule, and whether hardware shows it."""
    rows = []
    for path in sorted((EMULATOR / "tests" / "refused").glob("*.py")):
        text = path.read_text()
        header = dict(HEADER.findall(text))
        docstring = ast.get_docstring(ast.parse(text)) or ""
        sentence = " ".join(docstring.partition("\n\n")[0].split()).rstrip(".")
        rows.append([f"`{path.stem}`", sentence, header["source"], header["seen on hardware"]])
    return rows


def operators() -> list[list[str]]:
    """By source file: operators, those with a dtype rule, those with a hardware verdict, statements
    that check, documents."""
    from ascend_emulator import coverage, facts

    families: dict[str, set[str]] = {}
    for point in coverage.entry_points():
        if point.family.startswith("ops/") and point.state == "computed":
            families.setdefault(point.family, set()).add(point.name)
    rules = {*facts.dtypes()}
    verdicts = tomllib.loads(VERDICTS.read_text())
    seen = {name for table in verdicts.values() if isinstance(table, dict) for name in table}
    rows = []
    for family, names in sorted(families.items()):
        text = _source(SOURCES / f"{family}.cpp")
        checks = len(CHECK.findall(text))
        counts = [len(names), len(names & rules), len(names & seen), checks]
        rows.append(
            [
                f"`{family.removeprefix('ops/')}`",
                *(str(count or "") for count in counts),
                ", ".join(_documents(text)),
            ]
        )
    return rows


def _source(path: Path) -> str:
    """A source file with the headers of its own directory and their functions."""
    if not path.exists():  # The build writes it from families.h.
        path = path.with_suffix(".h")
    text = path.read_text()
    names = re.findall(r'^#include "([^"/]+)\.h"', text, re.MULTILINE)
    parts = [path.parent / f"{name}{suffix}" for name in names for suffix in (".h", ".cpp")]
    return text + "".join(part.read_text() for part in parts if part.exists() and part != path)


def _documents(text: str) -> Iterator[str]:
    """Documents that the comments of a source file name."""
    for what, pattern in (
        ("torch_npu's documentation", r"torch_npu's documentation"),
        ("op-plugin's call sites and tests", r"op-plugin's (?!docs)"),
        ("PyTorch", r"(?:as|of|in|by) (?:torch|PyTorch)\b|torch\.\w+|at::\w+"),
    ):
        comments = " ".join(" ".join(re.findall(r"//(.*)", text)).split())
        if re.search(pattern, comments):
            yield what
