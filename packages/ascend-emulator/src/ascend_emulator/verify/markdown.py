# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Markdown view of a report."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ascend_emulator.text_tables import markdown
from ascend_emulator.verify.report import OUTCOMES, Report, environment, title


def counts(report: Report) -> list[list[str]]:
    """By section: cases, and how many came to what."""
    rows = []
    for section, cases in report["cases"].items():
        if section != "environment":
            numbers = Counter(record["outcome"] for record in cases.values())
            beyond = sum(record.get("within") is False for record in cases.values())
            what = [f"{numbers[outcome]} {outcome}" for outcome in OUTCOMES if numbers[outcome]]
            what += [f"{beyond} of them beyond the tolerance"] * bool(beyond)
            rows.append([section, str(len(cases)), ", ".join(what)])
    return rows


def summary(report: Report) -> str:
    """Output of the command: the machine, and the counts."""
    facts = environment(report)
    lines = [title(report), "", *(f"  {name}: {value}" for name, value in facts.items()), ""]
    lines += [f"  {section}: {cases} cases: {what}" for section, cases, what in counts(report)]
    if not report["complete"]:
        lines += ["", "The report is not complete; cases that did not run are in it as skipped."]
    return "\n".join(lines)


def _codes(record: dict[str, Any]) -> str:
    codes = record.get("error", {}).get("codes", [])
    return " ".join([*codes, f"{record['context']} context"] if "context" in record else codes)


def _section(heading: str, head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"## {heading}", "", *markdown(head, rows), ""] if rows else []


def _row(name: str, record: dict[str, Any]) -> list[str]:
    """A case's outcome, codes and message."""
    message = record.get("error", {}).get("message", record.get("why", ""))
    return [f"`{name}`", record["outcome"], _codes(record), message]


def _facts(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_facts(each)}" for name, each in value.items() if name != "hash")
    return str(value)


def text(report: Report) -> str:
    """The report as a page: machine, counts, what is not as expected, refusals, facts and times."""
    lines = [f"# {title(report)}", ""]
    lines += markdown(["", ""], [[name, str(value)] for name, value in environment(report).items()])
    lines += ["", *markdown(["section", "cases", "outcome"], counts(report)), ""]
    cases = report["cases"]
    odd = []
    for name, record in cases.get("operators", {}).items():
        if record["outcome"] != "computed":
            odd.append(_row(name, record))
        elif record.get("within") is False:
            worst = max((output.get("ulps", 0) for output in record.get("outputs", [])), default=0)
            odd.append([f"`{name}`", "beyond the tolerance", "", f"{worst} ulps"])
    columns = ["case", "outcome", "codes", "message"]
    lines += _section("Operators that are refused or beyond the tolerance", columns, odd)
    shown = [
        [f"`{name}`", ", ".join(record["values"][0])]
        for name, record in cases.get("operators", {}).items()
        if "values" in record and record["values"] and isinstance(record["values"][0], list)
    ]
    lines += _section("Results of special values", ["case", "values"], shown)
    refusals = [_row(*case) for case in cases.get("refusals", {}).items()]
    lines += _section("Refusals", columns, refusals)
    for section in ("runtime", "limits", "timings", "launches", "collectives"):
        rows = [
            [
                f"`{name}`",
                _facts(record["facts"])
                if "facts" in record
                else " ".join([record["outcome"], record.get("why", ""), _codes(record)]),
            ]
            for name, record in cases.get(section, {}).items()
        ]
        lines += _section(section.capitalize(), ["case", "found"], rows)
    return "\n".join(lines)
