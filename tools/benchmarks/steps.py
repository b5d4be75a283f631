# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Draw the host time and the modelled time of a decode step over the batch size.

    tools/bench steps --output docs/step-times.svg

The host times are those of docs/reports/host-time.md, which `tools/bench --host` measures. The
NPU's are modelled: a decode step of Qwen3-0.6B in a graph, from steps of two and of four layers.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import environment
from benchmarks import plot, timeline

REPORT = environment.ROOT / "docs" / "reports" / "host-time.md"
ROW = re.compile(r"^\| decode \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)
LAYERS, PROMPT = 28, 64
"""Of the model whose host times are in the report, and the tokens of each request there."""


def host_times(report: str) -> dict[int, dict[str, float]]:
    """Milliseconds by batch size, from the first table of the report."""
    table = report.partition("| --- |")[2].partition("\n\n")[0]
    return {
        int(batch): {"host, eager: measured": float(eager), "host, graph: measured": float(graph)}
        for batch, eager, graph in ROW.findall(table)
    }


def modelled_time(batch: int) -> float:
    """Milliseconds of the NPU for a decode step. All layers take the same time."""

    def span(layers: int) -> float:
        with tempfile.TemporaryDirectory() as directory:
            events = timeline.step(Path(directory, "trace.json"), layers, batch, PROMPT)
        end = max(event["ts"] + event["dur"] for event in events)
        return (end - min(event["ts"] for event in events)) / 1000

    few, more = span(2), span(4)
    return few + (more - few) / 2 * (LAYERS - 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/step-times.svg"))
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 32, 256],
        metavar="N",
        help="of the report (1 32 256)",
    )
    options = parser.parse_args()
    runs: dict[str, dict[str, list[float]]] = {}
    measured = host_times(REPORT.read_text())
    for batch in options.batch:
        times = measured[batch] | {"NPU, graph: modelled, Ascend910B1": modelled_time(batch)}
        print(f"batch {batch}:", times, flush=True)
        runs[f"decode {batch}"] = {side: [time] for side, time in times.items()}
    title = "Decode step of 28 layers, ms: measured and modelled"
    options.output.write_text(plot.svg(runs, "decode", "ms", title))
