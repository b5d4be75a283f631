# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Published figures of real NPUs, and what laws of modelled times say of each.

serving.csv has one row for each published figure of a server, kernels.csv and collectives.csv of
an operator. ``previous`` is what the estimate was before the row was used in a fit.
"""

import csv
import math
import random
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ascend_cli import figures as chips
from ascend_cli.plan import estimate, laws
from ascend_cli.plan.model import Model, from_config

DATA = Path(__file__).parent
RECIPES = DATA.parent / "generated_docs" / "recipes.toml"
SEED = 42
WITHHELD = 10
"""Rows that no fit sees, chosen by ``SEED``."""


@dataclass(frozen=True)
class Row:
    """A published figure of a server. A chip that the source does not state ends with "?"."""

    source: str
    model: str
    chip: str
    quantization: str
    layout: estimate.Layout
    load: estimate.Load
    metric: str
    value: float
    previous: float

    @property
    def origin(self) -> Mapping[str, str]:
        """Its source's url, software, date and regime."""
        return sources()[self.source]

    @property
    def plain(self) -> bool:
        """In graph mode, without drafts."""
        return not self.load.eager and not self.load.drafts

    def calculation(self, known: laws.Laws) -> estimate._Calculation:
        chip = chips.figures_of(self.chip.rstrip("?"))
        assert chip
        return estimate._Calculation(models()[self.model], chip, self.layout, self.load, known)

    def modelled(self, known: laws.Laws) -> float:
        """The row's metric by these laws."""
        found = self.calculation(known).estimate()
        return getattr(found.modelled[self.origin["regime"]], self.metric)


@dataclass(frozen=True)
class Launch:
    """A published time of an operator or a collective."""

    law: str
    name: str
    seconds: float
    by: Callable[[Any], float]  # its law -> seconds
    model: str = ""
    previous: float = 0.0  # Seconds by the laws before, fitted without this row.


def _table(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(file))


@cache
def sources() -> dict[str, dict[str, str]]:
    return tomllib.loads((DATA / "sources.toml").read_text())


@cache
def models() -> dict[str, Model]:
    """Sizes of the models; those of the recipes by their configurations there."""
    families = tomllib.loads(RECIPES.read_text())["family"]
    recipes = {
        each["name"]: each["config"]
        for family in families
        for each in family["model"]
        if "config" in each  # Other recipes of a model refer to the one that has it.
    }
    found = tomllib.loads((DATA / "models.toml").read_text())
    return {
        name: from_config(recipes.get(config.get("recipe"), {}) | config, name)
        for name, config in found.items()
    }


@cache
def rows() -> tuple[Row, ...]:
    """serving.csv."""
    return tuple(
        Row(
            row["source"],
            row["model"],
            row["chip"],
            row["quantization"],
            estimate.Layout(int(row["tensor"]), 1, int(row["data"]), row["expert"] == "1"),
            estimate.Load(
                int(row["requests"]),
                int(row["input"]),
                int(row["output"]),
                row["quantization"],
                drafts=int(row["drafts"]),
                eager=row["eager"] == "1",
            ),
            row["metric"],
            float(row["value"]),
            float(row["previous"]),
        )
        for row in _table("serving.csv")
    )


@cache
def withheld() -> frozenset[Row]:
    """Rows of vllm-ascend that no fit sees."""
    known = [row for row in rows() if "vllm-ascend" in row.origin["software"]]
    return frozenset(random.Random(SEED).sample(known, WITHHELD))


@cache
def launches() -> tuple[Launch, ...]:
    """kernels.csv and collectives.csv."""
    chip = chips.FIGURES[chips.PROFILED]

    def kernel(row: Mapping[str, str]) -> Launch:
        count, moved, work = (float(row[name]) for name in ("rows", "bytes", "flops"))
        name = f"{row['operator']} {row['shape']}"
        seconds = float(row["microseconds"]) / 1e6
        return Launch(
            row["law"],
            name,
            seconds,
            lambda law: law.seconds(chip, moved, work, count),
            row["model"],
            float(row["previous"] or 0) / 1e6,
        )

    def collective(row: Mapping[str, str]) -> Launch:
        ranks, sent = int(row["ranks"]), float(row["bytes"])
        if row["law"] == "collective":
            sent *= 2 * (ranks - 1) / ranks if row["collective"] == "allReduce" else ranks - 1
        name = f"{row['collective']} of {row['bytes']} bytes, {ranks} ranks"
        seconds = float(row["microseconds"]) / 1e6
        return Launch(row["law"], name, seconds, lambda law: law.seconds(chip, sent, ranks))

    return tuple(
        [kernel(row) for row in _table("kernels.csv")]
        + [collective(row) for row in _table("collectives.csv")]
    )


def quantile(values: Iterable[float], part: float) -> float:
    """The value below which this part of the values is, interpolated."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
