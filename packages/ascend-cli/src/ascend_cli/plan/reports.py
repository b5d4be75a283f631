# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Times of the user's NPUs for ``vllm-ascend plan``: a report of ``ascend-emulator verify``,
``kernel_details.csv`` of torch_npu's profiler, or the result of ``vllm bench serve``."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ascend_cli.figures import ChipFigures, figures_of
from ascend_cli.plan.law import Observation
from ascend_cli.plan.laws import COLLECTIVE, FITTED, Laws

KINDS = (
    "a report of `ascend-emulator verify`, kernel_details.csv of torch_npu's profiler, or the JSON"
    " of `vllm bench serve --save-result`"
)
MATMULS = {"MatMul": "matmul", "QuantBatchMatmul": "matmul int8"}
VECTORS = {
    "AddRmsNorm": ("norm", 4.0),
    "RmsNorm": ("norm", 2.0),
    "SwiGlu": ("activation", 1.5),
    "DynamicQuant": ("quantize", 1.5),
    "AscendQuant": ("static quantize", 1.5),
}
"""Operators of a profile by the beginning of their type: the law, and the elements moved for each
element of the first input."""


def measured(chip: ChipFigures, path: Path) -> tuple[ChipFigures, Laws]:
    """The chip's figures and the laws, with the times that a file contains.

    Raises:
        ValueError: not such a file, of another chip or of the emulator, or without times.
    """
    try:
        if path.suffix == ".csv":
            return chip, _corrected(chip, path, _profile(path))
        found = json.loads(path.read_text())
        if "mean_tpot_ms" in found:
            return chip, _served(path, found)
        cases = found["cases"]
        facts = cases["environment"]["environment"]["facts"]
        soc, emulated = facts["soc"], facts["emulated"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not {KINDS}: {type(error).__name__} {error}") from None
    if emulated:
        raise ValueError(
            f"{path} is a report of the emulator, whose times are those of a CPU; fix: a report of"
            " an NPU"
        )
    if figures_of(soc) != chip:
        raise ValueError(
            f"{path} is a report of {soc}; fix: --soc {soc}, or a report of {chip.name}"
        )
    records = {
        name: record.get("facts", {})
        for part in ("timings", "launches", "collectives")
        for name, record in cases.get(part, {}).items()
    }
    reduced = records.get("two-npus", {}).get("all_reduce", {})  # by bytes
    exchanged = records.get("collectives-by-size", {}).get("collectives", ())
    seen = list(_verified(records))
    if not (seen or reduced or exchanged):
        raise ValueError(
            f"{path} has no times; fix: ascend-emulator verify --only timings,collectives on"
            " the NPU"
        )
    if reduced and not exchanged:
        # Between two ranks an all-reduce sends each byte once.
        attained = max(each["gb_per_second"] for each in reduced.values())
        link = "injection_gbs" if chip.injection_gbs else "link_gbs"
        chip = dataclasses.replace(
            chip,
            collective_us=min(each["microseconds"] for each in reduced.values()),
            **{link: attained / COLLECTIVE.bandwidth},
        )
    laws = _hosts(_corrected(chip, path, seen), path, records.get("forty-layers", {}))
    if exchanged:
        sent = [(size, ranks, us / 1e6) for _, ranks, size, us in exchanged]
        slower, collective = laws.collective.corrected(chip, sent, path.name)
        chip = dataclasses.replace(chip, collective_us=chip.collective_us * slower)
        laws = dataclasses.replace(laws, collective=collective)
    return chip, laws


def _hosts(laws: Laws, path: Path, facts: Mapping[str, Any]) -> Laws:
    """The host's laws with the measured time of layers, without vLLM: the replay in a graph, and
    the launches without one, if they take longer than the law."""
    if "graph_host" not in facts:
        return laws
    graph, eager = (facts[f"{way}_host"] / facts["layers"] / 1e3 for way in ("graph", "eager"))
    return dataclasses.replace(
        laws,
        hosts={
            regime: dataclasses.replace(
                host,
                layer_ms=max(host.layer_ms, graph) if regime == "tuned" else host.layer_ms,
                eager_ms=max(host.eager_ms, eager),
                layers_origin=path.name,
            )
            for regime, host in laws.hosts.items()
        },
    )


def _corrected(chip: ChipFigures, path: Path, seen: Any) -> Laws:
    by_law = defaultdict(list)
    for law, one in seen:
        by_law[law].append(one)
    corrected = {
        name: law.corrected(chip, by_law[name], path.name) if name in by_law else law
        for name, law in FITTED.operators.items()
    }
    return dataclasses.replace(FITTED, operators=corrected)


def _verified(records: Mapping[str, Any]) -> Iterator[tuple[str, Observation]]:
    """Launches of a report of ``ascend-emulator verify``."""
    for facts in records.values():
        for law, moved, work, rows, microseconds in facts.get("launches", ()):
            yield law, Observation(moved, work, rows, microseconds / 1e6)
    if row := records.get("one-token-by-a-matrix", {}).get("gb_per_second"):
        size = 2 * 4096**2
        yield "matmul", Observation(size, size, 1, size / row / 1e9)
    for case, law, bytes_ in (
        ("matmul-float16", "matmul", 6),
        ("matmul-bfloat16", "matmul", 6),
        ("matmul-int8", "matmul int8", 4),
    ):
        for size, rate in records.get(case, {}).get("by_size", {}).items():
            work = 2 * int(size) ** 3
            yield law, Observation(bytes_ * int(size) ** 2, work, int(size), work / rate / 1e12)


def _profile(path: Path) -> Iterator[tuple[str, Observation]]:
    """Launches of a profile: matmuls, and vector operators whose work follows from their shapes."""
    with path.open() as file:
        for row in csv.DictReader(file):
            shapes = [
                [int(size) for size in shape.split(",") if size]
                for shape in row["Input Shapes"].strip('"').split(";")
            ]
            seconds, first = float(row["Duration(us)"]) / 1e6, shapes[0]
            for begins, law in MATMULS.items():
                if row["Type"].startswith(begins) and len(first) == 2 and first[1]:
                    (rows, depth), weights = first, math.prod(shapes[1])
                    width, element = weights // depth, 1 if law.endswith("int8") else 2
                    moved = element * (weights + rows * depth) + 2 * rows * width
                    yield law, Observation(moved, 2 * rows * weights, rows, seconds)
            for begins, (law, factor) in VECTORS.items():
                if row["Type"].startswith(begins) and first:
                    size = 2 * factor * math.prod(first)
                    yield law, Observation(size, 0, math.prod(first[:-1]), seconds)


def _served(path: Path, found: Mapping[str, Any]) -> Laws:
    """A server's mean time per output token, as the time of the host in the typical regime."""
    host = dataclasses.replace(
        FITTED.hosts["typical"], step_ms=float(found["mean_tpot_ms"]), origin=path.name
    )
    return dataclasses.replace(FITTED, hosts={**FITTED.hosts, "typical": host})
