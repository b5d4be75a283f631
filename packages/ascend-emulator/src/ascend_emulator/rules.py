# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Rules of operators, from the TOML files beside the operators' C++ sources.

docs/emulator-rules.md describes the files. build.py compiles the tables, ``ascend-emulator verify``
has a case for each rule that says how to break it, and the documentation lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from ascend_emulator import families, text_tables, toml
from ascend_emulator.facts import DTYPES

SOURCES = Path(__file__).parent / "csrc"
DOCUMENT = "torch_npu 2.13"
BASES = ("documented", "seen on hardware", "used by another project", "inferred")
FAMILIES = ("Ascend910A", "Ascend310P", "Ascend910B", "Ascend910_93", "Ascend950")
SUBJECT = r"(\w+)(?:\.(dtype|rank|elements|shape|size\((-?\d+)\)))?"
PREDICATES = {
    "one_of": re.compile(rf"{SUBJECT} in ([\w, -]+)"),
    "range": re.compile(rf"{SUBJECT} in (-?\d+)\.\.(-?\d+)"),
    "multiple": re.compile(rf"{SUBJECT} % (\d+)"),
    "contiguous": re.compile(r"(\w+) is contiguous"),
    "given": re.compile(r"(\w+) is (given|absent)"),
    "same": re.compile(rf"{SUBJECT} is {SUBJECT}"),
}
MOST = 9  # values of a clause (rule_table.h)
TEXTS: list[str] = []  # that the limits name


@dataclass(frozen=True)
class Case:
    """How a rule is broken: a call of torch_npu and its inputs (verify/inputs.py)."""

    call: str
    inputs: dict[str, str]


@dataclass(frozen=True)
class Rule:
    """A rule of some operators.

    Attributes:
        id: the operators' name in the table, a dot, and the rule's name.
        limits: comparisons that must hold; none if a C++ function checks the rule.
        when: comparisons that decide whether the limits apply.
        says: what the document says, word by word.
        source: the document and its version, or the thread of what was seen.
        basis: one of BASES.
        case: how to break it; None if that needs more than a call.
    """

    id: str
    limits: tuple[str, ...]
    when: tuple[str, ...]
    says: tuple[str, ...]
    source: str
    basis: str
    case: Case | None


@dataclass(frozen=True)
class Description:
    """Operators with the same rules.

    Attributes:
        name: of the table.
        family: source file below csrc, without suffix.
        operators: names of CANN.
        functions: names of torch_npu, whose documentation has the rules.
        names: torch_npu's name of a parameter to that in the C++ source, where they differ.
        valid: a call that breaks no rule.
        rules: in the order in which they are checked.
        unchecked: sentences of the documentation that are no rules here, with the reason.
    """

    name: str
    family: str
    operators: tuple[str, ...]
    functions: tuple[str, ...]
    names: dict[str, str]
    valid: Case | None
    rules: tuple[Rule, ...]
    unchecked: dict[str, str] = field(default_factory=dict)


def _tuple(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _case(table: dict[str, Any], changes: dict[str, Any]) -> Case:
    """The call of a table with other inputs, values of ``$name``, or another call."""
    inputs = table.get("inputs", {})
    inputs = inputs | {name: changes[name] for name in inputs.keys() & changes.keys()}
    call = changes.get("call", table["call"])
    call = Template(call).safe_substitute(table.get("values", {}) | changes)
    used = {name: text for name, text in inputs.items() if re.search(rf"\b{name}\b", call)}
    return Case(call, used)


def _rule(name: str, key: str, table: dict[str, Any], each: dict[str, Any]) -> Rule:
    says, source = _tuple(each.get("says", [])), each.get("source", table.get("source"))
    basis = each.get("basis", table.get("basis", BASES[0] if says or source else BASES[2]))
    if basis not in BASES:
        raise ValueError(f"rule {name}.{key}: basis {basis!r}; supported: {', '.join(BASES)}")
    breaks = each.get("breaks")
    return Rule(
        f"{name}.{key}",
        _tuple(each.get("limit", [])),
        _tuple(each.get("when", [])),
        says,
        source or (DOCUMENT if says else "no document is quoted"),
        basis,
        _case(table, breaks) if breaks else None,
    )


def _unchecked(table: dict[str, str | list[str]]) -> dict[str, str]:
    """Sentences with their reason; a list has the sentences of the reason before it."""
    reasons: dict[str, str] = {}
    for key, value in table.items():
        reasons |= {key: value} if isinstance(value, str) else dict.fromkeys(value, key)
    return reasons


def _description(path: Path, name: str, table: dict[str, Any]) -> Description:
    rules = [_rule(name, key, table, each) for key, each in table.get("rules", {}).items()]
    if chips := table.get("chips"):
        limit = f"chip in {', '.join(chips)}"
        source = table.get("source", DOCUMENT)
        basis = table.get("basis", BASES[0])
        rules.insert(0, Rule(f"{name}.chip", (limit,), (), (), source, basis, None))
    return Description(
        name,
        str(path.relative_to(SOURCES).with_name(table.get("file", path.stem))),
        tuple(table["operators"]),
        tuple(table.get("functions", ())),
        table.get("names", {}),
        _case(table, {}) if "call" in table else None,
        tuple(rules),
        _unchecked(table.get("unchecked", {})),
    )


def files() -> list[Path]:
    """The files of the tables."""
    return sorted({*SOURCES.rglob("*.toml")} - {*families.tables(SOURCES)})


@cache
def descriptions() -> tuple[Description, ...]:
    """All descriptions, by file and in a file's order.

    Raises:
        ValueError: two descriptions have the same name.
    """
    by_name: dict[str, Description] = {}
    for path in files():
        for name, table in toml.loads(path.read_text()).items():
            if name in by_name:
                raise ValueError(f"{path.name}: two descriptions are called {name}")
            by_name[name] = _description(path, name, table)
    return tuple(by_name.values())


@cache
def rules() -> dict[str, Rule]:
    """All rules by id."""
    return {rule.id: rule for each in descriptions() for rule in each.rules}


def _number(text: str) -> int:
    """The number of an attribute's text in the table of texts."""
    if text not in TEXTS:
        TEXTS.append(text)
    return TEXTS.index(text)


def _clause(text: str, names: dict[str, str], head: str) -> str:
    """C++ initializer of a comparison (rule_table.h)."""

    def parameter(name: str) -> str:
        return f'"{names.get(name, name)}", "{name}"'

    def clause(
        subject: str, predicate: str, name: str, dim: str | None, other: str, values: Any
    ) -> str:
        shown = ", ".join(map(str, values))
        return (
            f"{{{head}, Subject::{subject}, Predicate::{predicate}, {parameter(name)}, {dim or 0},"
            f" {other}, {len(values)}, {{{shown}}}}}"
        )

    none = "Subject::chip, nullptr, nullptr, 0"
    for predicate, pattern in PREDICATES.items():
        match = pattern.fullmatch(text)
        if not match:
            continue
        name = match[1]
        if predicate == "contiguous":
            return clause("contiguous", "one_of", name, None, none, [1])
        if predicate == "given":
            return clause("given", "one_of", name, None, none, [int(match[2] == "given")])
        subject = (match[2] or "value").partition("(")[0]
        if predicate == "same":
            of = (match[5] or "value").partition("(")[0]
            other = f"Subject::{of}, {parameter(match[4])}, {match[6] or 0}"
            return clause(subject, predicate, name, match[3], other, [])
        values = [each.strip() for each in match[4].split(",")]
        if predicate == "range":
            values = [match[4], match[5]]
        if subject == "dtype":
            values = [str(DTYPES[each]) for each in values]
        elif name == "chip":
            subject, values = "chip", [str(FAMILIES.index(each)) for each in values]
        elif not all(re.fullmatch(r"-?\d+", each) for each in values):
            subject, values = "text", [str(_number(each)) for each in values]
        if len(values) > MOST:
            raise ValueError(f"{text!r} has {len(values)} values; at most {MOST} are supported")
        return clause(
            subject, predicate, name, match[3], none, [f"{int(each)}ll" for each in values]
        )
    raise ValueError(f"no limit: {text!r}; docs/emulator-rules.md has the forms")


def _clauses(description: Description, numbers: dict[str, int]) -> Iterator[str]:
    for rule in description.rules:
        for limit in rule.limits:
            for text in (*rule.when, limit):
                head = f"{numbers[rule.id]}, {'true' if text is not limit else 'false'}"
                yield _clause(text, description.names, head)


def source() -> str:
    """C++ source of the tables."""
    numbers = {id: number for number, id in enumerate(rules())}
    rows = [f'{{"{each.id}", "{each.basis}", "{each.source}"}}' for each in rules().values()]
    clauses: list[str] = []
    operators = []
    for each in descriptions():
        first = len(clauses)
        clauses += _clauses(each, numbers)
        operators += [
            f'{{"{name}", clauses + {first}, clauses + {len(clauses)}}}' for name in each.operators
        ]
    families = [f'"{name}"' for name in FAMILIES]
    tables = {
        "extern const Rule rules": [*rows, "{}"],
        "static const Clause clauses": clauses,
        "extern const OperatorRules operator_rules": [*operators, "{}"],
        "extern const char* const chip_families": [*families, "nullptr"],
        "extern const char* const rule_texts": [*(f'"{text}"' for text in TEXTS), "nullptr"],
    }
    parts = [
        f"{head}[] = {{\n{''.join(f'{row},{chr(10)}' for row in rows)}}};"
        for head, rows in tables.items()
    ]
    return "\n".join(['#include "operator/rule_table.h"', "namespace emu {", *parts, "}", ""])


def table() -> str:
    """The rules as text: id, basis, source, and limits."""
    rows = [
        [rule.id, rule.basis, rule.source, "; ".join(rule.limits) or "(C++)"]
        for rule in rules().values()
    ]
    lines = text_tables.aligned(["rule", "basis", "source", "limits"], rows, names=4)
    return "\n".join(map(str.rstrip, lines))
