#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fit the constants of ascend_cli/plan/laws.toml on published figures, and print them.

Each fit minimizes squared logarithms of modelled / published time, where the rows of each model
have the same weight together. ``left_out`` gives each row what laws say that were fitted without
the rows of its model; kernels and collectives have too few models, and leave out one row. Vector
operators of one class share constants (``SHARED``), because none has rows enough for its own.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from ascend_cli.plan import laws
from ascend_cli.plan.estimate import Times
from published import figures

ROWS = ("norm", "activation", "quantize", "rope", "scatter", "sort", "argmax", "softmax", "top-k")
"""Vector operators that work by rows."""
FIELDS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("start_us", "rows_us", "bandwidth", "rate"),
    "matmul int8": ("start_us", "rows_us", "bandwidth", "rate"),
    "attention": ("bandwidth",),
    "latent attention": ("bandwidth",),
    "prefill attention": ("rate",),
    **dict.fromkeys((*ROWS, "static quantize", "transpose"), ("start_us", "rows_us", "bandwidth")),
    "routing": ("start_us", "rows_us"),
    "elementwise": ("start_us", "bandwidth"),
    "sampling": ("bandwidth",),
    "collective": ("rank_us", "step_us", "bandwidth"),
    "experts": ("start_us",),
}
"""The constants of each law that are fitted; the others are assumed."""
SHARED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "start_us": (ROWS, ("elementwise", "transpose")),
    "rows_us": ((*ROWS, "static quantize", "transpose"),),
    "bandwidth": (("elementwise", "activation", "static quantize", "transpose"),),
}
"""Constants that several laws have together. Operators that work by rows have a start, and a time
until all cores have rows; those that read and write each element once have a bandwidth."""
NEUTRAL = {"start_us": 5.0, "rows_us": 10.0, "bandwidth": 0.5, "rate": 0.5}
"""Where each fit begins, so that a constant without rows is not one that its rows once gave."""


def constant(law: str, field: str) -> tuple[str, str]:
    """The constant that is a field of a law, by the first law that has it."""
    laws_of = next((all for all in SHARED.get(field, ()) if law in all), (law,))
    return laws_of[0], field


def minimum(
    loss: Callable[[Sequence[float]], float], start: Sequence[float], scale: float = 0.5
) -> list[float]:
    """Non-negative arguments with the least loss near ``start``, by a pattern search."""
    point, best = list(start), loss(start)
    steps = [max(abs(value) * scale, 1e-3) for value in start]
    while (
        max(step / max(abs(value), 1e-2) for step, value in zip(steps, point, strict=True)) > 1e-3
    ):
        moved = False
        for i, step in enumerate(steps):
            for sign in (1, -1):
                trial = [*point]
                trial[i] = max(trial[i] + sign * step, 1e-6)
                if (value := loss(trial)) < best - 1e-12:
                    point, best, moved = trial, value, True
        if not moved:
            steps = [step / 2 for step in steps]
    return point


def together(name: str) -> list[str]:
    """The laws that are fitted with this one: those of one constant, and of theirs."""
    found = [name]
    for one in found:
        mine = {constant(one, field) for field in FIELDS[one]}
        found += [
            other
            for other in FIELDS
            if other not in found and mine & {constant(other, field) for field in FIELDS[other]}
        ]
    return [each for each in FIELDS if each in found]


@cache
def _fitted(names: tuple[str, ...], without: frozenset[figures.Launch]) -> dict[str, Any]:
    first: dict[str, Any] = {**laws.LAWS, "collective": laws.COLLECTIVE, "experts": laws.EXPERTS}
    seen = [one for one in figures.launches() if one.law in names and one not in without]
    constants = [*dict.fromkeys(constant(name, field) for name in names for field in FIELDS[name])]
    start = [NEUTRAL.get(field, 1.0) for _, field in constants]

    def replaced(values: Sequence[float]) -> dict[str, Any]:
        known = dict(zip(constants, values, strict=True))
        return {
            name: dataclasses.replace(
                first[name], **{field: known[constant(name, field)] for field in FIELDS[name]}
            )
            for name in names
        }

    def loss(values: Sequence[float]) -> float:
        known = replaced(values)
        # Like squares for small errors, like the error itself for a row that no law explains.
        return sum(
            math.sqrt(1 + (math.log(one.by(known[one.law]) / one.seconds) / 0.1) ** 2)
            for one in seen
        )

    return replaced(minimum(loss, start))


def law(name: str, without: Collection[figures.Launch] = ()) -> Any:
    """A law of the device, fitted without these rows."""
    names = tuple(together(name))
    mine = frozenset(one for one in without if one.law in names)
    return _fitted(names, mine)[name]


@cache
def _times(row: figures.Row) -> Callable[[laws.HostLaw], Times]:
    """The times of a row by the host's law; the device's are computed once."""
    calculation, load = row.calculation(laws.FITTED), row.load
    requests, waves = calculation.waves()
    parts = calculation.step(requests, load.input + load.output / 2)
    prompt = calculation.prefill()
    return lambda host: calculation.times(host, parts, prompt, requests, waves)


def _seen(without: str, metrics: Collection[str], regime: str = "typical") -> list[figures.Row]:
    return [
        row
        for row in figures.rows()
        if row.origin["regime"] == regime
        and row.metric in metrics
        and row.model != without
        and "vllm-ascend" in row.origin["software"]
        and row not in figures.withheld()
    ]


def _loss(rows: Sequence[figures.Row], power: int, host: laws.HostLaw) -> float:
    """Powers of the logarithms, by a host's law."""
    weights = Counter(row.model for row in rows)
    total = 0.0
    for row in rows:
        found = getattr(_times(row)(host), row.metric)
        total += abs(math.log(found / row.value)) ** power / weights[row.model]
    return total


@cache
def host(without: str = "") -> laws.HostLaw:
    """The host's law of the typical regime: of graphs by times per output token; of steps without
    a graph by times to the first token, of all versions, where the median model decides."""
    graphs = [row for row in _seen(without, {"token_ms"}) if recent(row) and row.plain]
    step, layer = minimum(
        lambda values: _loss(graphs, 2, laws.HostLaw(values[0], values[1], 0.0)), (20.0, 0.4)
    )
    prompts = _seen(without, {"first_ms"})
    eager = min(
        (each / 20 for each in range(201)),
        key=lambda each: _loss(prompts, 1, laws.HostLaw(step, layer, each)),
    )
    return laws.HostLaw(step, layer, eager)


def recent(row: figures.Row) -> bool:
    """Whether the software is vllm-ascend from 0.13 on. Older versions have another host's law, on
    too few rows for a fit."""
    software = row.origin["software"]
    minor = re.search(r"vllm-ascend 0\.(\d+)", software)
    return "vllm-ascend" in software and (minor is None or int(minor[1]) >= 13)


@cache
def accepted(without: str = "") -> float:
    """Accepted fraction of drafts, by the throughput of tuned servers; the median row decides."""
    rows = [row for row in _seen(without, {"tokens_per_second"}, "tuned") if row.load.drafts]

    def loss(fraction: float) -> float:
        known = dataclasses.replace(laws.FITTED, accepted=fraction)
        return sum(abs(math.log(row.modelled(known) / row.value)) for row in rows)

    return min((each / 50 for each in range(51)), key=loss)


def left_out(row: figures.Row) -> float:
    """The modelled value of the row, by laws fitted without the rows of its model."""
    hosts = {**laws.HOSTS, "typical": host(row.model)}
    hosts["tuned"] = dataclasses.replace(hosts["tuned"], eager_ms=hosts["typical"].eager_ms)
    drafts = accepted(row.model) if row.load.drafts else laws.FITTED.accepted
    return row.modelled(dataclasses.replace(laws.FITTED, hosts=hosts, accepted=drafts))


def main() -> None:
    for name in FIELDS:
        found = law(name)
        print(name, {field: round(getattr(found, field), 4) for field in FIELDS[name]})
    print("host", host())
    print("accepted", accepted())


if __name__ == "__main__":
    main()
