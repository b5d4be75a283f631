# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Parameters of operators by their C++ sources. A limit of a parameter that no operator of its table
has would hold for each call (csrc/operator/rule_checks.cpp), so that build.py refuses it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ascend_emulator.rules import Description

COMMENT = re.compile(r"//[^\n]*")
MACRO = re.compile(r"^#define (\w+)\((?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
STRUCT = re.compile(r"\bstruct (\w+)[^;{}()]*\{")
FIELDS = re.compile(r"\bFIELDS\(([^)]*)\)")
LISTED = re.compile(r"\b[A-Z][A-Z_0-9]*\(\s*(\w+),\s*\(")
"""An operator's macro with its name and its list of parameters."""
NOT_PARAMETERS = {"chip", "contiguous", "absent", "given"}


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _closed(text: str, start: int, pair: str) -> str:
    """The text from ``start``, behind an opening bracket, to the closing one."""
    depth, end = 1, start
    while depth and end < len(text):
        depth += (text[end] == pair[0]) - (text[end] == pair[1])
        end += 1
    return text[start:end]


def parameters(sources: Iterable[Path]) -> dict[str, set[str]]:
    """Operator to the words of its list of parameters, with the fields of structs among them.

    Operators whose macro has the list have the words of that macro.
    """
    texts = [COMMENT.sub("", path.read_text()) for path in sources]
    fields: dict[str, set[str]] = {}
    for text in texts:
        for struct in STRUCT.finditer(text):
            for listed in FIELDS.findall(_closed(text, struct.end(), "{}")):
                fields.setdefault(struct[1], set()).update(_words(listed))
    macros = {macro[1]: macro[0] for text in texts for macro in MACRO.finditer(text)}

    def whole(text: str) -> set[str]:
        words = _words(text)
        return words.union(*(fields[word] for word in words & fields.keys()))

    found: dict[str, set[str]] = {}
    for text in texts:
        for macro, name in re.findall(r"\b([A-Z][A-Z_0-9]*)\(\s*(\w+)\b", text):
            if macro in macros:
                found.setdefault(name, set()).update(whole(macros[macro]))
    for text in texts:
        for match in LISTED.finditer(text):
            found[match[1]] = whole(_closed(text, match.end(), "()"))
    return found


def named(limit: str) -> set[str]:
    """The parameters that a limit or condition names."""
    return set(re.findall(r"(?:^| is )([a-zA-Z]\w*)", limit)) - NOT_PARAMETERS


def unbound(descriptions: Iterable[Description], known: dict[str, set[str]]) -> Iterator[str]:
    """Errors of limits whose parameter no operator of their table has."""
    for each in descriptions:
        operators = [name.removeprefix("aclop::") for name in each.operators]
        own: set[str] = set().union(*(known.get(name, set()) for name in operators))
        for rule in each.rules:
            for limit in (*rule.limits, *rule.when):
                for name in sorted(named(limit)):
                    parameter = each.names.get(name, name)
                    if parameter not in own:
                        yield (
                            f"rule {rule.id}: {limit!r} is about {parameter!r}, which is no"
                            f" parameter of {', '.join(each.operators)}; fix: the name in their"
                            " C++ source, or `names` of the table"
                        )
