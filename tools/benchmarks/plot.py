# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The medians of a benchmark over the batch size, as an SVG image; the spread of the runs is drawn
as bars."""

from __future__ import annotations

import math
from statistics import median
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, LEGEND = 400, 260, 40, 16, 34, 44, 18
"""Units of the image, which is read on telephones, too; the legend is below the plot."""
COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df")


def svg(
    runs: dict[str, dict[str, list[float]]], phase: str, unit: str, title: str | None = None
) -> str:
    """Draw one phase.

    Args:
        runs: values of all runs by ``"<phase> <batch size>"`` and side.
        phase: ``"decode"`` or ``"prefill"``.
        unit: of the values, for the title.
        title: by default the phase and the unit.
    """
    rows = {int(key.split()[1]): sides for key, sides in runs.items() if key.split()[0] == phase}
    batches = sorted(rows)
    highest = max(value for sides in rows.values() for values in sides.values() for value in values)
    power = 10 ** math.floor(math.log10(highest))
    step = next(part * power for part in (0.2, 0.5, 1, 2) if highest <= 7 * part * power)
    top = step * math.ceil(highest / step)

    def x(batch: int) -> float:
        span = math.log2(batches[-1]) - math.log2(batches[0])
        return LEFT + (WIDTH - LEFT - RIGHT) * (
            (math.log2(batch) - math.log2(batches[0])) / span if span else 0.5
        )

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    title = title or f"{phase}, {unit} (median, lowest and highest)"
    parts = [f'<text x="10" y="20" font-weight="bold">{escape(title)}</text>']
    for tick in range(round(top / step) + 1):
        value = tick * step
        parts += [f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>']
        parts += [f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>']
    parts += [
        f'<text x="{x(each):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{each}</text>'
        for each in batches
    ]
    parts += [
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">batch'
        " size</text>"
    ]
    for number, side in enumerate(rows[batches[0]]):
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{x(each):.1f},{y(median(rows[each][side])):.1f}" for each in batches)
        parts += [f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>']
        for each in batches:
            values = rows[each][side]
            parts += [
                f'<path d="M{x(each):.1f} {y(min(values)):.1f}V{y(max(values)):.1f}"'
                f' stroke="{color}"/>'
            ]
            parts += [
                f'<circle cx="{x(each):.1f}" cy="{y(median(values)):.1f}" r="3" fill="{color}"/>'
            ]
        parts += [
            f'<text x="{LEFT}" y="{HEIGHT + LEGEND * number + 12}"'
            f' fill="{color}">{escape(side)}</text>'
        ]
    height = HEIGHT + LEGEND * len(rows[batches[0]])
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="560" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])
