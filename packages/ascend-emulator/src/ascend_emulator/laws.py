# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Laws of modelled times, from ``fitted_laws.toml`` and ``laws.toml``, and their correction by a
report of an NPU."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ascend_emulator import law as fitted_laws
from ascend_emulator import toml
from ascend_emulator.chips import Chip
from ascend_emulator.law import CollectiveLaw, Law, Observation

SAMPLING = ("sort", "argmax", "softmax", "top-k")
"""The parts of "sampling", which a report has together."""


@cache
def _table(name: str = "laws") -> dict[str, Any]:
    return toml.loads((Path(__file__).parent / f"{name}.toml").read_text())


def laws() -> dict[str, Law]:
    """The laws of operators by name."""
    assumed = {name: Law(**constants) for name, constants in _table()["assumed"].items()}
    return fitted_laws.operators(_table("fitted_laws")) | assumed


def collectives() -> dict[str, CollectiveLaw]:
    """The laws of collectives by name."""
    return fitted_laws.collectives(_table("fitted_laws"))


def description(chip: Chip, known: Mapping[str, Law]) -> str:
    """The laws and the operators of each as the library reads them (csrc/core/laws.cpp): words, a
    line for each."""
    lines: list[tuple[Any, ...]] = [
        ("law", name, each.start_us, each.rows_us, each.bandwidth, each.rate)
        for name, each in known.items()
    ]
    lines += [
        (
            "collective",
            name,
            each.start_us,
            each.rank_us,
            each.step_us,
            each.step_bytes,
            each.bandwidth,
        )
        for name, each in collectives().items()
    ]
    for entry in _table()["ai_cpu"]:
        if chip.name.startswith(tuple(entry["chips"])):
            lines.append(
                ("rule", "AI CPU", "", ",".join(entry["dtypes"]), "arguments", *entry["names"])
            )
    for entry in _table()["operators"]:
        names, moved = ",".join(entry["laws"]), entry.get("moved", "arguments")
        lines.append(("rule", names, entry.get("int8", ""), "", moved, *entry["names"]))
    words = ([str(word).replace(" ", "_") or "-" for word in line] for line in lines)
    return "\n".join(map(" ".join, words))


def measured(chip: Chip, records: Mapping[str, Any]) -> dict[str, Law]:
    """The laws, with the times in a report's records."""
    seen = defaultdict(list)
    for name, moved, work, rows, microseconds in _launches(records):
        seen[name].append(Observation(moved, work, rows, microseconds / 1e6))
    fitted = laws()
    known = {
        name: each.corrected(chip, seen[name], each.origin) if name in seen else each
        for name, each in fitted.items()
    }
    faster = known["sampling"].bandwidth / fitted["sampling"].bandwidth
    for name in SAMPLING:
        each = known[name]
        known[name] = dataclasses.replace(each, bandwidth=each.bandwidth * faster)
    return known


def _launches(records: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Law, bytes, operations, rows and microseconds of the launches of a report."""
    for facts in records.values():
        yield from (tuple(launch) for launch in facts.get("launches", ()))
    if rate := records.get("copy-on-the-device", {}).get("best"):
        size = 256 << 20
        yield "elementwise", size, 0, 1, size / rate / 1e3
    for case, law, bytes_ in (
        ("matmul-float16", "matmul", 6),
        ("matmul-bfloat16", "matmul", 6),
        ("matmul-int8", "matmul int8", 4),
    ):
        for text, rate in records.get(case, {}).get("by_size", {}).items():
            size, work = int(text), 2 * int(text) ** 3
            yield law, bytes_ * size**2, work, size, work / rate / 1e6
