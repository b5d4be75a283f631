# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Results of tools/bench as Markdown, JSON and a plot."""

from __future__ import annotations

import json
from statistics import median

from benchmarks import plot
from benchmarks.models import EXPERTS, NARROW


def written(result: dict, suffix: str, text: str) -> str:
    """The result as a file with this suffix."""
    if suffix == ".json":
        return json.dumps(result, indent=1)
    if suffix != ".svg":
        return text
    unit = "ms of a step" if result["host"] else "tokens per second"
    return plot.svg(result[unit], next(iter(result[unit])).split()[0], unit)


def table(result: dict) -> str:
    """The medians in Markdown, with each CPU column followed by the median of the runs' ratios to
    it."""
    first, *others = result["sides"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    unit = "ms of a step" if result["host"] else "tokens/s"
    measured = result["ms of a step" if result["host"] else "tokens per second"]
    rows = [[unit, "batch", first, *(cell for other in others for cell in (other, "ratio"))]]
    rows.append(["---"] * len(rows[0]))
    for key, sides in measured.items():
        row = [*key.split(), f"{median(sides[first]):.1f}"]
        for other in others:
            ratios = [
                mine / theirs for mine, theirs in zip(sides[first], sides[other], strict=True)
            ]
            if result["host"]:  # Times of the first run, which is eager.
                ratios = [1 / ratio for ratio in ratios]
            row += [f"{median(sides[other]):.1f}", f"{median(ratios):.2f}"]
        rows.append(row)
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    runs = len(next(iter(measured.values()))[first])
    shape = (
        f"a model of width {NARROW['hidden_size']}" if result["narrow"] else "Qwen3-0.6B's shape"
    )
    shape += f", {EXPERTS['num_experts']} experts a layer," if result["experts"] else ""
    threads = f"{result['threads']} threads on either side"
    if result["host"] or result["null"]:
        threads = (
            "one thread, null mode" if result["host"] else "one thread for each NPU, null mode"
        )
    return (
        f"{lines}\n{shape} with {result['layers']} layers, random weights, bfloat16; {versions}; "
        f"{result['processor']}, {threads}; medians of {runs} runs; "
        f"load average {result['load']:.1f}\n"
    )
