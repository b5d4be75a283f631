# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Plots of the benchmarks as SVG, drawn by matplotlib."""

from __future__ import annotations

import io
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

WIDTH = 400
"""Units of an image, which is read on telephones too, where they are pixels."""
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#d0d7de",
    "legend.fontsize": 11,
    "legend.frameon": False,
    "svg.fonttype": "none",  # Text stays text.
    "svg.hashsalt": "vllm-ascend-all",  # The same figure is the same file.
}


def axes(height: int) -> tuple[Figure, Any]:
    """A figure of ``WIDTH`` by ``height`` units, and its axes. Call it in `style()`."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    return figure, figure.add_subplot()


def style() -> Any:
    """A context in which figures are drawn and written."""
    return mpl.rc_context(STYLE)


def written(figure: Figure) -> str:
    """The figure as text of an SVG file."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def svg(
    runs: dict[str, dict[str, list[float]]], phase: str, unit: str, title: str | None = None
) -> str:
    """Draw the medians of one phase over the batch size, with bars from the lowest run to the
    highest.

    Args:
        runs: values of all runs by ``"<phase> <batch size>"`` and side.
        phase: ``"decode"`` or ``"prefill"``.
        unit: of the values, for the title.
        title: by default the phase and the unit.
    """
    rows = {int(key.split()[1]): sides for key, sides in runs.items() if key.split()[0] == phase}
    batches = sorted(rows)
    sides = list(rows[batches[0]])
    with style():
        figure, plot = axes(260 + 18 * len(sides))
        for side in sides:
            values = [rows[batch][side] for batch in batches]
            middle = [median(each) for each in values]
            spread = [
                [centre - min(each) for centre, each in zip(middle, values, strict=True)],
                [max(each) - centre for centre, each in zip(middle, values, strict=True)],
            ]
            plot.errorbar(batches, middle, spread, marker="o", markersize=5, label=side)
        plot.set_title(title or f"{phase}, {unit} (median, lowest and highest)", loc="left")
        plot.set_xscale("log", base=2)
        plot.set_xticks(batches, [str(batch) for batch in batches])
        plot.minorticks_off()
        plot.set_xlabel("batch size")
        plot.set_ylim(bottom=0)
        plot.grid(axis="y")
        figure.legend(loc="outside lower left")
        return written(figure)
