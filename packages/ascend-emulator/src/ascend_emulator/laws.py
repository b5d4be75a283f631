# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Laws of modelled times, from ``laws.toml``, and their correction by a report of an NPU."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from ascend_emulator import toml
from ascend_emulator.chips import Chip

FULL_ROWS = 256
"""Rows at which an operator's start is longest."""
SAMPLING = ("sort", "argmax", "softmax", "top-k")
"""The parts of "sampling", which a report has together."""


@dataclass(frozen=True)
class Law:
    """Time of an operator: its start, and the longer of moving its bytes and its operations.

    ``bandwidth`` and ``rate`` are fractions of the chip's figures.
    """

    start_us: float
    rows_us: float = 0.0
    bandwidth: float = 1.0
    rate: float = 1.0

    def seconds(self, chip: Chip, moved: float, work: float = 0.0, rows: float = 1.0) -> float:
        """Time of a launch that moves and computes this much."""
        start = self.start_us + self.rows_us * min(rows / FULL_ROWS, 1.0)
        return start / 1e6 + max(self._moving(chip, moved), self._working(chip, work))

    def _moving(self, chip: Chip, moved: float) -> float:
        return moved / (self.bandwidth * chip.bandwidth)

    def _working(self, chip: Chip, work: float) -> float:
        return work / (self.rate * chip.cube_flops)

    def corrected(self, chip: Chip, launches: list[tuple[float, ...]]) -> Law:
        """The law with the median factors of launches (bytes, operations, rows, microseconds): one
        of starts and bandwidth, from those bound by memory, and one of the rate."""
        factors: dict[bool, list[float]] = {False: [], True: []}
        for moved, work, rows, microseconds in launches:
            bound = self._working(chip, work) > self._moving(chip, moved)
            factors[bound].append(microseconds / 1e6 / self.seconds(chip, moved, work, rows))
        slower, busier = (median(factors[bound] or [1.0]) for bound in (False, True))
        return Law(
            self.start_us * slower,
            self.rows_us * slower,
            self.bandwidth / slower,
            self.rate / busier,
        )


@dataclass(frozen=True)
class CollectiveLaw:
    """Time of a collective: a start, more for each rank, and the bytes that a rank sends, with a
    step where HCCL changes its protocol."""

    start_us: float
    rank_us: float = 0.0
    step_us: float = 0.0
    step_bytes: float = 0.0
    bandwidth: float = 1.0


@cache
def _table() -> dict[str, Any]:
    return toml.loads((Path(__file__).parent / "laws.toml").read_text())


def laws() -> dict[str, Law]:
    """The laws of operators by name."""
    return {name: Law(**law) for name, law in (_table()["laws"] | _table()["assumed"]).items()}


def collectives() -> dict[str, CollectiveLaw]:
    """The laws of collectives by name."""
    return {name: CollectiveLaw(**law) for name, law in _table()["collectives"].items()}


def description(chip: Chip, known: Mapping[str, Law]) -> str:
    """The laws and the operators of each as the library reads them (csrc/core/laws.cpp): words, a
    line for each."""
    lines = [("law", name, *dataclasses.astuple(law)) for name, law in known.items()]
    lines += [
        ("collective", name, *dataclasses.astuple(law)) for name, law in collectives().items()
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
    """The laws with the times of a report's records, where it has them."""
    seen = defaultdict(list)
    for law, *launch in _launches(records):
        seen[law].append(tuple(launch))
    fitted = laws()
    known = {
        name: law.corrected(chip, seen[name]) if name in seen else law
        for name, law in fitted.items()
    }
    faster = known["sampling"].bandwidth / fitted["sampling"].bandwidth
    for name in SAMPLING:
        law = known[name]
        known[name] = dataclasses.replace(law, bandwidth=law.bandwidth * faster)
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
