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
                altered = "a figure was altered, or the references differ"
                return f"result {place}: the same bits, but {text}: {altered}", ""
            continue
        if a.get("within") != b.get("within"):
            which = "first" if a.get("within") else "second"
            return f"result {place}: within the tolerance only in the {which} report: {text}", ""
        low, high = sorted(numbers["ulps"])
        if high > WORSE * max(low, 1) or not differing.keys().isdisjoint(("special", "most")):
            return f"result {place}: {text}", ""
        if "within" not in a:
            return f"result {place}: {VALUES}", ""
        small.append(text or "other bits, the same errors")
    return "", "; ".join(small)


def _case(name: str, ours: dict[str, Any], theirs: dict[str, Any], comparison: Comparison) -> None:
    if "skipped" in (ours["outcome"], theirs["outcome"]):
        comparison.missing += 1
        return
    if _how(ours) != _how(theirs):
        comparison.disagreements[name] = f"{_how(ours)} | {_how(theirs)}"
        return
    problem, rounding = _outputs(ours, theirs)
    values = zip(ours.get("values", []), theirs.get("values", []), strict=False)
    shown = next(((a, b) for a, b in values if a != b), None)
    if (problem or not ours.get("outputs")) and shown:
        problem = f"{problem or VALUES}: {shown[0]} | {shown[1]}"
    a, b = ours.get("facts", {}), theirs.get("facts", {})
    differing = [key for key in {**a, **b} if a.get(key) != b.get(key)]
    problem = problem or "; ".join(f"{key}: {a.get(key)} | {b.get(key)}" for key in differing)
    if problem:
        comparison.disagreements[name] = problem
    elif rounding:
        comparison.rounding[name] = rounding
    else:
        comparison.agreements += 1


def _numbers(value: Any, name: str = "") -> dict[str, float]:
    """All numbers of nested objects by their path."""
    if isinstance(value, dict):
        return {
            key: each
            for part, inner in value.items()
            for key, each in _numbers(inner, f"{name} {part}").items()
        }
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {name.strip(): float(value)} if is_number else {}


def compare(ours: Report, theirs: Report) -> Comparison:
    """Compare two reports, case by case. Times are listed and never disagree."""
    comparison = Comparison()
    for section in {**ours["cases"], **theirs["cases"]}:
        first, second = ours["cases"].get(section, {}), theirs["cases"].get(section, {})
        if section == "environment":
            continue
        for name in {**first, **second}:
            if name not in first or name not in second:
                comparison.missing += 1
            elif section in ("timings", "launches", "collectives"):
                facts = [each[name].get("facts", {}) for each in (first, second)]
                a, b = map(_numbers, facts)
                comparison.times |= {f"{name} {key}": (a[key], b[key]) for key in a.keys() & b}
                one, other = (
                    {**each[name], "facts": fact.get("results", {})}
                    for each, fact in zip((first, second), facts, strict=True)
                )
                _case(f"{section} {name}", one, other, comparison)
            else:
                _case(f"{section} {name}", first[name], second[name], comparison)
    return comparison


def text(ours: Report, theirs: Report, comparison: Comparison) -> str:
    """The comparison for a reader: disagreements first."""
    lines = [f"A: {title(ours)}", f"B: {title(theirs)}", ""]
    lines += [
        f"{which} was altered after it was written."
        for which, each in (("A", ours), ("B", theirs))
        if each.get("checksum") != checksum(each)
    ]
    lines.append(
        f"{comparison.agreements} agree, {len(comparison.rounding)} differ by rounding,"
        f" {len(comparison.disagreements)} disagree, {comparison.missing} are in one report only or were"
        " skipped."
    )
    for heading, rows in (
        ("Disagreements (A | B)", comparison.disagreements),
        ("Rounding (A and B)", comparison.rounding),
    ):
        if rows:
            lines += ["", f"{heading}:", *(f"  {name}: {what}" for name, what in rows.items())]
    if comparison.times:
        width = max(map(len, comparison.times))
        times = sorted(comparison.times.items())
        lines += ["", "Times (A, B):"]
        lines += [f"  {name.ljust(width)}  {a:10.4g}  {b:10.4g}" for name, (a, b) in times]
    return "\n".join(lines)
