# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Laws of modelled times: of an operator by its bytes, operations and rows, of a collective by its
bytes and ranks, and of the host by its stack.

``tools/published/fit.py`` fits the constants on public rows, and docs/modelled-times.md shows the
error of each law. The operators' rows are one profile of Atlas A3 (vllm-ascend 0.15, CANN 8.5);
for another chip the fractions of its published figures are assumed to be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from ascend_platform.chips import PROFILED, ChipFigures

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
        chip: ChipFigures,
        moved: float,
        work: float = 0.0,
        rows: float = 1.0,
        count: float = 1.0,
    ) -> float:
        """Time of ``count`` launches that move and compute this much together."""
        start = count * (self.start_us + self.rows_us * min(rows / FULL_ROWS, 1.0)) / 1e6
        return start + max(self._moving(chip, moved), self._working(chip, work))

    def _moving(self, chip: ChipFigures, moved: float) -> float:
        return moved / (self.bandwidth * chip.bandwidth_gbs * 1e9)

    def _working(self, chip: ChipFigures, work: float) -> float:
        return work / (self.rate * chip.tflops * 1e12)

    def corrected(self, chip: ChipFigures, seen: Iterable[Observation], origin: str) -> Law:
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
        start_us: least start, in microseconds, unless the chip's is longer.
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

    def seconds(self, chip: ChipFigures, sent: float, ranks: int) -> float:
        """Time of a collective in which each rank sends this number of bytes."""
        return sum(self._parts(chip, sent, ranks)) if ranks > 1 else 0.0

    def _parts(self, chip: ChipFigures, sent: float, ranks: int) -> tuple[float, float]:
        """Start and transfer of a collective, in seconds."""
        start = max(self.start_us, self.rank_us * (ranks - 1), chip.collective_us)
        start += self.step_us if sent > self.step_bytes else 0.0
        return start / 1e6, sent / (self.bandwidth * chip.send_gbs(ranks) * 1e9)

    def corrected(
        self, chip: ChipFigures, seen: Iterable[tuple[float, int, float]], origin: str
    ) -> tuple[ChipFigures, CollectiveLaw]:
        """The chip and the law with the median factors of collectives that were measured (bytes
        sent, ranks, seconds): of starts, and of the bandwidth behind such a start."""
        parts = [(*self._parts(chip, sent, ranks), seconds) for sent, ranks, seconds in seen]
        small = [taken / (start + moving) for start, moving, taken in parts if start > moving]
        later = median(small or [1.0])
        large = [
            max(taken - later * start, moving / 10) / moving
            for start, moving, taken in parts
            if start <= moving
        ]
        chip = dataclasses.replace(chip, collective_us=chip.collective_us * later)
        return chip, dataclasses.replace(
            self,
            start_us=self.start_us * later,
            rank_us=self.rank_us * later,
            step_us=self.step_us * later,
            bandwidth=self.bandwidth / median(large or [1.0]),
            origin=origin,
        )


@dataclass(frozen=True)
class HostLaw:
    """Modelled time of the host for a step, in milliseconds; the device's overlaps with it.

    Attributes:
        step_ms: of a decode step in a graph.
        layer_ms: of a decode step in a graph, for each layer.
        eager_ms: of a step without a graph, as of a prefill, for each layer.
        origin: report whose times these are; empty: see ``HOST_ORIGINS``.
        layers_origin: report of the times for each layer; empty: those of the regime.
    """

    step_ms: float
    layer_ms: float
    eager_ms: float
    origin: str = ""
    layers_origin: str = ""

    def graph(self, layers: int) -> float:
        """Seconds of a decode step in a graph."""
        return (self.step_ms + self.layer_ms * layers) / 1e3

    def eager(self, layers: int) -> float:
        """Seconds of a step without a graph."""
        return self.eager_ms * layers / 1e3


LAWS: Mapping[str, Law] = {
    "matmul": Law(6.8, 8.7, 0.80, 0.80),
    "matmul int8": Law(12.3, 19.7, 0.97, 1.68),
    "attention": Law(10.0, bandwidth=0.487),
    "latent attention": Law(10.0, bandwidth=0.351),
    "prefill attention": Law(10.0, rate=0.336),
    "norm": Law(4.07, 9.27, 0.595),
    "activation": Law(4.07, 9.27, 0.802),
    "quantize": Law(4.07, 9.27, 0.395),
    "static quantize": Law(9.65, 9.27, 0.802),
    "rope": Law(4.07, 9.27, 0.175),
    "scatter": Law(4.07, 9.27, 0.072),
    "transpose": Law(1.81, 9.27, 0.802),
    "routing": Law(5.78, 29.6),
    "elementwise": Law(1.81, bandwidth=0.802),
    "sort": Law(4.07, 9.27, 0.0264),
    "argmax": Law(4.07, 9.27, 0.045),
    "softmax": Law(4.07, 9.27, 0.126),
    "top-k": Law(4.07, 9.27, 0.242),
    "sampling": Law(0.0, bandwidth=0.0133),
}
"""By operator. Those that read and write each element once have a bandwidth in common, those that
work by rows a start. "scatter" copies rows one by one, as writes of the KV cache do. Sampling moves
logits in 32 bits; its time is that of sort, softmax, top-k and argmax together."""
COLLECTIVE = CollectiveLaw(0.0, 1.2, 38.5, 5e6, 0.904)
EXPERTS = CollectiveLaw(68.9)
"""Dispatch or combine of tokens between NPUs with experts."""
HOSTS: Mapping[str, HostLaw] = {
    "tuned": HostLaw(4.0, 0.0, 4.15),
    "typical": HostLaw(55.0, 0.0, 4.15),
}
HOST_ORIGINS = {
    "tuned": "assumed",
    "typical": "fitted on public rows of vllm-ascend 0.13 to 0.20, models of 40 to 94 layers",
}
BANDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "tuned": {
        "first_ms": (0.85, 1.59),
        "token_ms": (0.72, 1.2),
        "tokens_per_second": (0.63, 1.17),
    },
    "typical": {
        "first_ms": (1.11, 3.03),
        "token_ms": (0.71, 1.28),
        "tokens_per_second": (0.44, 1.27),
    },
}
"""Published / modelled of the rows of a regime at quantiles of 10 and 90 %, by laws fitted without
the rows of the same model (docs/modelled-times.md)."""


@dataclass(frozen=True)
class Laws:
    """All laws of an estimate.

    Attributes:
        operators: laws of the device's operators.
        collective: law of collectives.
        experts: law of the exchange of tokens with experts.
        hosts: of the host, by regime.
        accepted: fraction of draft tokens that are accepted, each after the one before it.
    """

    operators: Mapping[str, Law]
    collective: CollectiveLaw
    experts: CollectiveLaw
    hosts: Mapping[str, HostLaw]
    accepted: float = 0.46

    def origins(self, chip: ChipFigures) -> dict[str, str]:
        """Where the times of the device and of each regime's host come from."""
        fitted = f"fitted on public rows of {PROFILED}"
        if chip.name != PROFILED:
            fitted += f" and assumed for {chip.name}"
        reports: dict[str, list[str]] = {}
        for name, law in [*self.operators.items(), ("collectives", self.collective)]:
            if law.origin:
                reports.setdefault(law.origin, []).append(name)
        parts = [f"{', '.join(names)} measured ({file})" for file, names in reports.items()]
        found = {"device": "; ".join([*parts, f"{'others ' if parts else ''}{fitted}"])}
        for regime, host in self.hosts.items():
            source = f"measured ({host.origin})" if host.origin else HOST_ORIGINS[regime]
            found[f"{regime} host"] = f"{host.step_ms:.0f} ms a step in a graph, {source}"
            if host.layers_origin:
                found[f"{regime} host"] += (
                    f"; {host.layer_ms * 1e3:.3g} us a layer in a graph and {host.eager_ms:.3g} ms"
                    f" without, measured ({host.layers_origin})"
                )
        return found


FITTED = Laws(LAWS, COLLECTIVE, EXPERTS, HOSTS)
