# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Prose of the checkout: comments, docstrings and messages of Python, comments of C++, pages."""

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness import checkout

STYLE = "docs/style.md"
_CODE = re.compile(r"``.*?``|`[^`\n]*`|'[^' ]*'|\"[^\" ]*\"|^ +\w+(?:, \w+)*:", re.MULTILINE)
_GENERATED = re.compile(r"<!-- begin: (\S+) -->.*?<!-- end: \1 -->|```.*?```", re.DOTALL)
_CPP = re.compile(r'"(?:\\.|[^"\\\n])*"|//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/', re.DOTALL)


class Rule(NamedTuple):
    """A row of one of the style guide's tables of patterns."""

    avoid: str
    use: str
    pattern: re.Pattern[str]


class Text(NamedTuple):
    """A piece of prose: where it begins, and what it is ("comment", "docstring", "message",
    "C++" or "page")."""

    path: str
    line: int
    role: str
    text: str


def rules(section: str = "Words") -> list[Rule]:
    """A table of docs/style.md: that of words, which holds for all prose, or that of syntax, which
    holds for pages."""
    _, _, text = (checkout.ROOT / STYLE).read_text().partition(f"\n## {section}\n")
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ((?:[^|]|\\\|)+) \|$",
        text.partition("\n## ")[0],
        re.MULTILINE,
    )
    return [
        Rule(avoid, use, re.compile("|".join(patterns).replace(r"\|", "|"), re.MULTILINE))
        for avoid, use, cell in rows
        if (patterns := re.findall("`([^`]+)`", cell))
    ]


@functools.cache
def words(text: str) -> str:
    """A text without the code that it quotes and names of arguments, in as many lines."""
    return re.sub(r"(?<=\w)\n[ \t]*(?=\w)", "\n", _CODE.sub("`…`", text))


def violations(text: Text, table: list[Rule]) -> list[str]:
    """Violations of the table, each with its line and what to write instead."""
    prose = words(text.text)
    return [
        f"{text.path}:{text.line + prose.count(chr(10), 0, match.start())}: {text.role}:"
        f" {match[0]!r}; write: {rule.use}"
        for rule in table
        for match in rule.pattern.finditer(prose)
    ]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment of Python; whole lines one below the other are one comment."""
    lines: list[str] = []
    first, last, indent = 0, 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith("#!"):
            continue
        (row, column), text = token.start, token.string.lstrip("#: ")
        whole = not token.line[:column].strip()
        if lines and not (whole and text and (row, column) == (last + 1, indent)):
            yield first, "\n".join(lines)
            lines = []
        if not whole:
            yield row, text
        elif text:
            if not lines:
                first, indent = row, column
            lines.append(text)
            last = row
    if lines:
        yield first, "\n".join(lines)


def strings(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, role and text of the docstrings, and of other strings of several words. A string with
    an import is a program."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    pieces: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = node.values
            pieces |= {id(part) for part in parts}
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "`…`" for part in parts
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = "" if id(node) in pieces else node.value
        else:
            continue
        if id(node) in docstrings:
            yield node.lineno, "docstring", text
        elif " " in text and not re.search(r"^\s*(import|from|def) ", text, re.MULTILINE):
            yield node.lineno, "message", text


def cpp_comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment of C++; lines one below the other are one comment."""
    lines: list[str] = []
    first = 0
    for match in _CPP.finditer(source):
        text = match["block"] if match["line"] is None else match["line"]
        if text is None:
            continue
        line = source.count("\n", 0, match.start()) + 1
        if lines and line != first + sum(each.count("\n") + 1 for each in lines):
            yield first, "\n".join(lines)
            lines = []
        first = first if lines else line
        lines.append(text)
    if lines:
        yield first, "\n".join(lines)


def page(text: str) -> str:
    """A page without generated regions, blocks of code and targets of links, in as many lines."""
    text = _GENERATED.sub(lambda match: "\n" * match[0].count("\n"), text)
    return re.sub(r"\]\([^)\s]*\)", "]", text)


def texts() -> Iterator[Text]:
    """All prose of the tracked files, without the tables of the style guide."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=checkout.ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    for path in listed.stdout.splitlines():
        file = checkout.ROOT / path
        if file.is_file() and (file.suffix in {".py", ".md", ".cpp", ".h"} or is_command(path)):
            yield from texts_of(path, file.read_text())


def is_command(path: str) -> bool:
    """Whether a path is one of the commands of tools/, which have no suffix."""
    return Path(path).parent.name == "tools" and not Path(path).suffix


def texts_of(path: str, source: str) -> Iterator[Text]:
    """The prose of a file."""
    if path.endswith(".md"):
        if path == STYLE:
            source = re.sub(r"^\|.*$", "", source, flags=re.MULTILINE)
        yield Text(path, 1, "page", page(source))
    elif path.endswith((".cpp", ".h")):
        for line, text in cpp_comments(source):
            yield Text(path, line, "C++", text)
    else:
        for line, text in comments(source):
            yield Text(path, line, "comment", text)
        for line, role, text in strings(source):
            yield Text(path, line, role, text)
