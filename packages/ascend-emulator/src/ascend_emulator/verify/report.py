# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Reports: their form, its check, and a checksum."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

SCHEMA = 1
SECTIONS = (
    "environment",
    "operators",
    "refusals",
    "runtime",
    "timings",
    "launches",
    "collectives",
    "limits",
)
CLOCKS = {True: ("emulated", "modelled"), False: ("measured",)}
"""Clocks of times, by whether the NPU is emulated."""
OUTCOMES = (
    "computed",
    "accepted",
    "observed",
    "refused",
    "absent",
    "failed",
    "crashed",
    "hung",
    "skipped",
)
FACTS = {
    "emulated": bool,
    "soc": str,
    "cann": str,
    "driver": str,
    "torch": str,
    "torch_npu": str,
    "python": str,
    "machine": str,
    "npus": int,
    "memory_mib": int,
}
CASE = {
    "outcome": str,
    "inputs": str,
    "outputs": list,
    "values": list,
    "facts": dict,
    "error": dict,
    "within": bool,
    "why": str,
    "context": str,
    "signal": int,
}
OUTPUT = {
    "dtype": str,
    "shape": list,
    "hash": str,
    "ulps": (int, float),
    "max_abs": (int, float),
    "rel": (int, float),
    "special": int,
    "different": int,
    "most": int,
    "within": bool,
    "why": str,
    "number": (int, float, bool),
}
PRIVATE = (
    ("a path", re.compile(r"(?<![\w.)\]])/(?:[\w.+@-]+/)+[\w.+@-]*")),
    (
        "an address",
        re.compile(r"\b(?!127\.0\.0\.1\b)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b|0x[0-9a-fA-F]{6,}"),
    ),
)

Report = dict[str, Any]


def checksum(report: Report) -> str:
    """A hash of everything but the checksum itself."""
    content = {name: value for name, value in report.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def text(report: Report) -> str:
    """The report as JSON, one case per line."""
    head = {name: value for name, value in report.items() if name != "cases"} | {
        "checksum": checksum(report)
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    sections = []
    for section, cases in report["cases"].items():
        rows = [f"   {json.dumps(name)}: {json.dumps(record)}" for name, record in cases.items()]
        sections.append(f"  {json.dumps(section)}: {{\n" + ",\n".join(rows) + "\n  }")
    return "{\n" + "\n".join(lines) + '\n "cases": {\n' + ",\n".join(sections) + "\n }\n}\n"


def parsed(path: Path) -> Any:
    """Content of a file of JSON.

    Raises:
        ValueError: the file is not JSON.
    """
    try:
        return json.loads(path.read_text(errors="replace"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def read(path: Path) -> Report:
    """A report from a file.

    Raises:
        ValueError: the file is not a report of this schema; the message has the first problem.
    """
    report = parsed(path)
    errors = problems(report, altered=False)
    if errors:
        raise ValueError(f"{path} is not a report: {errors[0]}")
    return report


def _typed(where: str, record: Any, form: dict[str, Any]) -> list[str]:
    if not isinstance(record, dict):
        return [f"{where} is {type(record).__name__}, not an object"]
    unknown = [f"{where} has an unknown field {name!r}" for name in record if name not in form]
    return unknown + [
        f"{where}: {name} is {type(value).__name__}"
        for name, value in record.items()
        if name in form and not isinstance(value, form[name])
    ]


def _launches(records: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Errors of times of launches: of their form and their clock."""
    allowed = CLOCKS[bool(facts.get("emulated"))]
    errors = []
    if facts.get("times") not in allowed:
        errors.append(
            f"times are {facts.get('times')!r}; supported here: {', '.join(allowed)}; fix: a report"
            " of ascend-emulator verify --timings"
        )
    for name, record in records.items():
        found = record.get("facts", {}) if isinstance(record, dict) else {}
        for row in [*found.get("launches", ()), *found.get("collectives", ())]:
            numbers = row[1:] if isinstance(row, list) and isinstance(row[0], str) else [None]
            if not all(isinstance(each, (int, float)) and each >= 0 for each in numbers):
                errors.append(f"launches {name!r}: {row} is not a name and numbers")
    return errors


def problems(report: Any, altered: bool = True) -> list[str]:
    """Errors of a report's form; with ``altered`` also a checksum that does not match."""
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        schema = report.get("schema") if isinstance(report, dict) else type(report).__name__
        return [f"schema is {schema}; supported: {SCHEMA}"]
    missing = {"schema", "emulator", "tables", "complete", "seconds", "cases"} - report.keys()
    if missing:
        return [f"missing: {', '.join(sorted(missing))}"]
    cases = report["cases"]
    unknown = [section for section in cases if section not in SECTIONS]
    if unknown:
        return [f"unknown section {unknown[0]!r}; supported: {', '.join(SECTIONS)}"]
    errors = []
    facts = environment(report)
    errors += [
        f"environment: {name} is missing or not {kind.__name__}"
        for name, kind in FACTS.items()
        if type(facts.get(name)) is not kind
    ]
    for section, records in cases.items():
        for name, record in records.items():
            where = f"{section} {name!r}"
            errors += _typed(where, record, CASE)
            if isinstance(record, dict) and record.get("outcome") not in OUTCOMES:
                errors.append(
                    f"{where}: outcome is {record.get('outcome')!r}; supported:"
                    f" {', '.join(OUTCOMES)}"
                )
            for output in record.get("outputs", []) if isinstance(record, dict) else []:
                errors += _typed(where, output, OUTPUT)
        if section == "launches":
            errors += _launches(records, facts)
    strings = json.dumps({section: list(records.values()) for section, records in cases.items()})
    errors += [
        f"it contains {what}: {match[0]}"
        for what, pattern in PRIVATE
        for match in [pattern.search(strings)]
        if match
    ]
    if altered and report.get("checksum") != checksum(report):
        errors.append("the checksum does not match: the report was altered after it was written")
    return errors


def environment(report: Report) -> dict[str, Any]:
    """The facts about the machine."""
    return report["cases"].get("environment", {}).get("environment", {}).get("facts", {})


def title(report: Report) -> str:
    """One line: chip, versions, and whether it was emulated."""
    facts = environment(report)
    kind = "emulated " if facts.get("emulated") else ""
    kind += "with modelled times " if facts.get("times") == "modelled" else ""
    return f"{kind}{facts.get('soc')}, CANN {facts.get('cann')}, torch_npu {facts.get('torch_npu')}"
