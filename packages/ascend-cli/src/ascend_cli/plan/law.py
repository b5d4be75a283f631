# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Laws of modelled times: of an operator by its bytes, operations and rows, and of a collective by
its bytes and ranks; and the reader of ``laws.toml``, which has their constants.

ascend-cli and ascend-emulator contain both files; in the emulator they are links. So this module
imports nothing of either, and runs with Python 3.10.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol


class Chip(Protocol):
    """Figures of a chip: bytes a second of its memory, operations a second of its cube cores in
    16-bit types."""

    @property
    def bandwidth(self) -> float: ...

    @property
    def cube_flops(self) -> float: ...


class LinkedChip(Protocol):
    """Figures of a chip's links."""

    @property
    def collective_us(self) -> float:
        """Least time of a collective, in microseconds."""
        ...

    def send_gbs(self, ranks: int) -> float:
        """GB/s that an NPU sends to ``ranks`` - 1 peers at once."""
        ...


FULL_ROWS = 256
"""Rows at which an operator's start is longest."""


@dataclass(frozen=True)
class Observation:
    """A measured launch: bytes moved, operations, rows and seconds."""

    moved: float
    work: float
    rows: float
    seconds: float


@dataclass(frozen=True)
class Law:
    """Modelled time of an operator: its start, and the longer of moving its bytes and its work.

    Attributes:
        start_us: of one row, in microseconds.
        rows_us: what ``FULL_ROWS`` rows and more add to it, in microseconds.
        bandwidth: fraction of the chip's memory bandwidth.
        rate: fraction of the cube cores' rate in 16-bit types.
        origin: report whose times these are; empty: fitted on public rows.
    """

    start_us: float
    rows_us: float = 0.0
    bandwidth: float = 1.0
    rate: float = 1.0
    origin: str = ""

    def seconds(
        self,
        chip: Chip,
        moved: float,
        work: float = 0.0,
        rows: float = 1.0,
        count: float = 1.0,
    ) -> float:
        """Time of ``count`` launches that move and compute this much together."""
        start = count * (self.start_us + self.rows_us * min(rows / FULL_ROWS, 1.0)) / 1e6
        return start + max(self._moving(chip, moved), self._working(chip, work))

    def _moving(self, chip: Chip, moved: float) -> float:
        return moved / (self.bandwidth * chip.bandwidth)

    def _working(self, chip: Chip, work: float) -> float:
        return work / (self.rate * chip.cube_flops)

    def corrected(self, chip: Chip, seen: Iterable[Observation], origin: str) -> Law:
        """The law with the median factors of what was measured: one of starts and bandwidth, from
        launches bound by memory, and one of the rate."""
        factors: dict[bool, list[float]] = {False: [], True: []}
        for one in seen:
            bound = self._working(chip, one.work) > self._moving(chip, one.moved)
            modelled = self.seconds(chip, one.moved, one.work, one.rows)
            factors[bound].append(one.seconds / modelled)
        slower = median(factors[False] or [1.0])
        return dataclasses.replace(
            self,
            start_us=self.start_us * slower,
            rows_us=self.rows_us * slower,
            bandwidth=self.bandwidth / slower,
            rate=self.rate / median(factors[True] or [1.0]),
            origin=origin if factors[False] or factors[True] else self.origin,
        )


@dataclass(frozen=True)
class CollectiveLaw:
    """Modelled time of a collective: a start, more for each rank, and the bytes that a rank sends,
    with a step where HCCL changes its protocol.

    Attributes:
        start_us: least start, in microseconds, unless the chip has a longer one.
        rank_us: start for each other rank, where that is more.
        step_us: time that a collective of more than ``step_bytes`` takes longer.
        step_bytes: bytes above which ``step_us`` is added.
        bandwidth: fraction of that of the chip's links.
        origin: report whose times these are; empty: fitted on public rows.
    """

    start_us: float
    rank_us: float = 0.0
    step_us: float = 0.0
    step_bytes: float = 0.0
    bandwidth: float = 1.0
    origin: str = ""

    def seconds(self, chip: LinkedChip, sent: float, ranks: int) -> float:
        """Time of a collective in which each rank sends this number of bytes."""
        return sum(self._parts(chip, sent, ranks)) if ranks > 1 else 0.0

    def _parts(self, chip: LinkedChip, sent: float, ranks: int) -> tuple[float, float]:
        """Start and transfer of a collective, in seconds."""
        start = max(self.start_us, self.rank_us * (ranks - 1), chip.collective_us)
        start += self.step_us if sent > self.step_bytes else 0.0
        return start / 1e6, sent / (self.bandwidth * chip.send_gbs(ranks) * 1e9)

    def corrected(
        self, chip: LinkedChip, seen: Iterable[tuple[float, int, float]], origin: str
    ) -> tuple[float, CollectiveLaw]:
        """The median factors of collectives that were measured (bytes sent, ranks, seconds): of
        starts, which holds for the chip's too, and the law with it and with that of the
        bandwidth."""
        parts = [(*self._parts(chip, sent, ranks), seconds) for sent, ranks, seconds in seen]
        small = [taken / (start + moving) for start, moving, taken in parts if start > moving]
        later = median(small or [1.0])
        large = [
            max(taken - later * start, moving / 10) / moving
            for start, moving, taken in parts
            if start <= moving
        ]
        return later, dataclasses.replace(
            self,
            start_us=self.start_us * later,
            rank_us=self.rank_us * later,
            step_us=self.step_us * later,
            bandwidth=self.bandwidth / median(large or [1.0]),
            origin=origin,
        )


def operators(table: Mapping[str, Any]) -> dict[str, Law]:
    """The laws of operators by name, from the contents of laws.toml."""
    return {name: Law(**constants) for name, constants in table["laws"].items()}


def collectives(table: Mapping[str, Any]) -> dict[str, CollectiveLaw]:
    """The laws of collectives by name, from the contents of laws.toml."""
    return {name: CollectiveLaw(**constants) for name, constants in table["collectives"].items()}
