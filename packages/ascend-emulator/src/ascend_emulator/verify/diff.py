# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Comparison of two reports: where an emulated and a real NPU, or two NPUs, disagree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ascend_emulator.verify.report import Report, checksum, title

WORSE = 4.0
"""A result disagrees if its error is beyond the case's tolerance in one report, or this many times
the other's above one ulp."""
VALUES = "values differ"


@dataclass
class Comparison:
    """Comparison of two reports, for the cases that both ran.

    Attributes:
        agreements: number of cases with the same result or refusal.
        rounding: case to its errors, where both are within the tolerance and the bits differ.
        disagreements: case to what differs.
        times: measurement to both figures.
        missing: number of cases that only one report has, or that were skipped.
    """

    agreements: int = 0
    rounding: dict[str, str] = field(default_factory=dict)
    disagreements: dict[str, str] = field(default_factory=dict)
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    missing: int = 0


def _how(record: dict[str, Any]) -> str:
    """One word and the codes for what came of a case."""
    words = [record["outcome"], *record.get("error", {}).get("codes", [])]
    if record.get("context") == "lost":
        words.append("and the context is lost")
    return " ".join(words)


def _outputs(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, str]:
    """Disagreements of two computed results, and differences by rounding only."""
    if ours.get("inputs") != theirs.get("inputs"):
        return "the inputs differ: the tables or torch's conversions are not the same", ""
    first, second = ours.get("outputs", []), theirs.get("outputs", [])
    if len(first) != len(second):
        return f"{len(first)} and {len(second)} results", ""
    small = []
    for place, (a, b) in enumerate(zip(first, second, strict=True)):
        for name in ("dtype", "shape", "number"):
            if a.get(name) != b.get(name):
                return f"result {place}: {name} {a.get(name)} and {b.get(name)}", ""
        numbers = {
            name: (a.get(name, 0), b.get(name, 0))
            for name in ("ulps", "max_abs", "rel", "special", "different", "most")
        }
        differing = {name: pair for name, pair in numbers.items() if pair[0] != pair[1]}
        text = ", ".join(f"{name} {a} and {b}" for name, (a, b) in differing.items())
        if a.get("hash") == b.get("hash"):
            if differing:
                return (
                    (
                        f"result {place}: the same bits, but {text}: a figure was altered, or the"
                        " references differ"
                    ),
                    "",
                )
            continue
        if a.get("within") != b.get("within"):
            return (
                (
                    f"result {place}: within the tolerance only in the"
                    f" {'first' if a.get('within') else 'second'} report: {text}"
                ),
                "",
            )
        low, high = sorted(numbers["ulps"])
        if (
            high > WORSE * max(low, 1)
            or numbers["special"][0] != numbers["special"][1]
            or numbers["most"][0] != numbers["most"][1]
        ):
            return f"result {place}: {text}", ""
        if "within" not in a:
            return f"result {place}: {VALUES}", ""
        small.append(text or "other bits, the same errors")
    return "", "; ".join(small)


def _case(name: str, ours: dict[str, Any], theirs: dict[str, Any], found: Comparison) -> None:
    if "skipped" in (ours["outcome"], theirs["outcome"]):
        found.missing += 1
        return
    if _how(ours) != _how(theirs):
        found.disagreements[name] = f"{_how(ours)} | {_how(theirs)}"
        return
    problem, rounding = _outputs(ours, theirs)
    shown = [
        (a, b)
        for a, b in zip(ours.get("values", []), theirs.get("values", []), strict=False)
        if a != b
    ]
    if (problem or not ours.get("outputs")) and shown:
        problem = f"{problem or VALUES}: {shown[0][0]} | {shown[0][1]}"
    facts = {**ours.get("facts", {}), **theirs.get("facts", {})}
    differing = [
        f"{fact}: {ours['facts'].get(fact)} | {theirs['facts'].get(fact)}"
        for fact in facts
        if ours.get("facts", {}).get(fact) != theirs.get("facts", {}).get(fact)
    ]
    problem = problem or "; ".join(differing)
    if problem:
        found.disagreements[name] = problem
    elif rounding:
        found.rounding[name] = rounding
    else:
        found.agreements += 1


def _numbers(value: Any, name: str = "") -> dict[str, float]:
    """All numbers of nested objects by their path."""
    if isinstance(value, dict):
        return {
            key: each
            for part, inner in value.items()
            for key, each in _numbers(inner, f"{name} {part}").items()
        }
    return (
        {name.strip(): float(value)}
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else {}
    )


def compare(ours: Report, theirs: Report) -> Comparison:
    """Compare two reports, case by case. Times are listed and never disagree."""
    found = Comparison()
    for section in {**ours["cases"], **theirs["cases"]}:
        first, second = ours["cases"].get(section, {}), theirs["cases"].get(section, {})
        if section == "environment":
            continue
        for name in {**first, **second}:
            if name not in first or name not in second:
                found.missing += 1
            elif section in ("timings", "collectives"):
                times = [
                    _numbers(record.get("facts", {})) for record in (first[name], second[name])
                ]
                found.times |= {
                    f"{name} {key}": (times[0][key], times[1][key])
                    for key in times[0].keys() & times[1].keys()
                }
                pair = [
                    {**each, "facts": each.get("facts", {}).get("results", {})}
                    for each in (first[name], second[name])
                ]
                _case(f"{section} {name}", pair[0], pair[1], found)
            else:
                _case(f"{section} {name}", first[name], second[name], found)
    return found


def text(ours: Report, theirs: Report, found: Comparison) -> str:
    """The comparison for a reader: disagreements first."""
    lines = [f"A: {title(ours)}", f"B: {title(theirs)}", ""]
    lines += [
        f"{which} was altered after it was written."
        for which, each in (("A", ours), ("B", theirs))
        if each.get("checksum") != checksum(each)
    ]
    lines.append(
        f"{found.agreements} agree, {len(found.rounding)} differ by rounding,"
        f" {len(found.disagreements)} disagree, {found.missing} are in one report only or were"
        " skipped."
    )
    for heading, rows in (
        ("Disagreements (A | B)", found.disagreements),
        ("Rounding (A and B)", found.rounding),
    ):
        if rows:
            lines += ["", f"{heading}:", *(f"  {name}: {what}" for name, what in rows.items())]
    if found.times:
        width = max(map(len, found.times))
        lines += [
            "",
            "Times (A, B):",
            *(
                f"  {name.ljust(width)}  {a:10.4g}  {b:10.4g}"
                for name, (a, b) in sorted(found.times.items())
            ),
        ]
    return "\n".join(lines)
