# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The command ``vllm-ascend plan``: arguments and output."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from ascend_platform.extension import installation

from ascend_cli import figures
from ascend_cli.plan import estimate
from ascend_cli.plan.laws import BANDS, FITTED
from ascend_cli.plan.model import BITS, load
from ascend_cli.plan.reports import KINDS, measured

HEAD = ("TP", "PP", "DP", "EP", "weights", "KV cache", "KV tokens", "requests", "sent/token")
TIMES = ("first", "token", "tokens/s", "bound by")
"""Columns of each regime."""
UNITS = {"first_ms": " ms", "token_ms": " ms"}


def add(parser: argparse.ArgumentParser) -> None:
    """Modelled memory and times of a model's parallel layouts on NPUs, best first."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="directory or Hugging Face Hub name; only config.json is read",
    )
    parser.add_argument(
        "--soc", help=f"chip (default: this machine's); one of: {', '.join(figures.FIGURES)}"
    )
    parser.add_argument("--npus", type=int, help="number of NPUs (default: this machine's)")
    scheme = parser.add_argument("--quantization", choices=[*BITS], metavar="SCHEME")
    scheme.help = f"of the linear layers: {', '.join(BITS)} (default: that of the checkpoint)"
    parser.add_argument(
        "--kv-cache-dtype", choices=["auto", "int8"], default="auto", help="auto: 16 bits (default)"
    )
    parser.add_argument(
        "--requests", type=int, default=64, metavar="N", help="concurrent requests (default: 64)"
    )
    parser.add_argument(
        "--input",
        type=int,
        default=1024,
        metavar="TOKENS",
        help="prompt tokens per request (default: 1024)",
    )
    parser.add_argument(
        "--output",
        type=int,
        default=256,
        metavar="TOKENS",
        help="generated tokens per request (default: 256)",
    )
    utilization = parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.92, metavar="FRACTION"
    )
    utilization.help = "as for vllm serve (default: 0.92)"
    parser.add_argument(
        "--speculative-tokens", type=int, default=0, metavar="K", help="draft tokens per step"
    )
    parser.add_argument("--enforce-eager", action="store_true", help="as for vllm serve")
    parser.add_argument("--report", type=Path, metavar="FILE", help=f"{KINDS}, of such an NPU")
    parser.add_argument("--all", action="store_true", help="also show layouts that do not fit")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the layouts, best first.

    Raises:
        ValueError: an option out of range, an unknown chip or model type, or a model that does not
            fit.
    """
    for name, floor in {"requests": 1, "input": 1, "output": 1, "speculative-tokens": 0}.items():
        if (value := getattr(options, name.replace("-", "_"))) < floor:
            raise ValueError(f"--{name} is {value}; fix: set {floor} or more")
    if not 0 < (share := options.gpu_memory_utilization) <= 1:
        raise ValueError(f"--gpu-memory-utilization is {share}; fix: set more than 0 and at most 1")
    soc = options.soc or installation.chip_name()
    chip = figures.figures_of(soc)
    if chip is None:
        raise ValueError(
            f"{f'unknown chip {soc!r}' if soc else 'no NPU was found'}; fix: --soc with one of:"
            f" {', '.join(figures.FIGURES)}"
        )
    laws = FITTED
    if options.report:
        chip, laws = measured(chip, options.report)
    npus = options.npus or installation.npu_count()[0]
    if npus < 1:
        raise ValueError("no NPU was found; fix: give their number with --npus")
    model = load(options.model)
    if 0 < model.longest < (tokens := options.input + options.output):
        raise ValueError(
            f"--input and --output are {tokens} tokens together; {model.name} takes {model.longest};"
            " fix: fewer of either"
        )
    given = estimate.Load(
        options.requests,
        options.input,
        options.output,
        options.quantization or model.scheme,
        1 if options.kv_cache_dtype == "int8" else 2,
        options.gpu_memory_utilization,
        options.speculative_tokens,
        options.enforce_eager,
    )
    found = [
        estimate.estimate(model, chip, layout, given, laws)
        for layout in estimate.layouts(model, npus)
    ]
    found.sort(key=_worst)
    shown = [one for one in found if options.all or not one.obstacle]
    if options.json:
        print(
            json.dumps(
                {
                    "chip": chip.name,
                    "npus": npus,
                    "layouts": [dataclasses.asdict(one) | _ranges(one) for one in shown],
                    "origins": laws.origins(chip),
                },
                indent=2,
            )
        )
        return 0
    if not any(not one.obstacle for one in found):
        least = min(found, key=lambda one: one.weights)
        fewer = [name for name, bits in BITS.items() if bits < BITS[given.quantization]]
        quantized = f", or --quantization with one of: {', '.join(fewer)}" if fewer else ""
        raise ValueError(
            f"{model.name} does not fit on {npus} {chip.name}: the smallest layout"
            f" ({_name(least.layout)}) {least.obstacle}; fix: --npus with more{quantized}"
        )
    width = f"{model.parameters / 1e9:.2f} billion weights, {model.active / 1e9:.2f} active"
    print(
        f"{model.name}: {width}; {npus} x {chip.name} ({chip.memory_gib} GiB, {chip.bandwidth_gbs}"
        f" GB/s, {chip.tflops} TFLOPS)"
    )
    workload = (
        f"{given.requests} concurrent requests, {given.input} input tokens, {given.output} output"
        " tokens"
    )
    print(f"{workload}; quantization {given.quantization}")
    head = (*HEAD, *(f"{regime} {name}" for regime in laws.hosts for name in TIMES))
    rows = [head, *(_row(one) for one in shown)]
    widths = [max(len(row[i]) for row in rows if len(row) == len(head)) for i in range(len(head))]
    for row in rows:
        print(
            "  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
            if len(row) == len(head)
            else "  ".join(row)
        )
    print(
        "times are modelled, not measured: ranges of the published values that the laws were chosen"
        " with, which hold 35 of 73 others"
    )
    for name, origin in laws.origins(chip).items():
        print(f"modelled {name}: {origin}")
    print(f"best if tuned: vllm serve {options.model} {shown[0].layout.options}".rstrip())
    return 0


def _worst(one: estimate.Estimate) -> tuple[bool, float, float]:
    """Sorts layouts, the fastest in a tuned deployment first."""
    speed = 0.0 if one.obstacle else one.modelled["tuned"].tokens_per_second
    return bool(one.obstacle), -speed, one.weights


def _row(one: estimate.Estimate) -> tuple[str, ...]:
    layout, gib = one.layout, estimate.GIB
    if one.obstacle:
        return (_name(layout), one.obstacle)
    return (
        *(str(size) for size in (layout.tensor, layout.pipeline, layout.data)),
        "yes" if layout.expert else "",
        f"{one.weights / gib:.1f} GiB",
        f"{one.cache / gib:.1f} GiB",
        str(one.kv_tokens),
        str(one.requests),
        f"{one.sent / 1e6:.2f} MB",
        *(
            value if name == "bound" else f"{value[0]:.0f}-{value[1]:.0f}{UNITS.get(name, '')}"
            for times in _ranges(one)["modelled"].values()
            for name, value in times.items()
        ),
    )


def _ranges(one: estimate.Estimate) -> dict[str, Any]:
    """The modelled times of a layout as ranges, by regime."""
    return {
        "modelled": {
            regime: {
                name: [getattr(times, name) * factor for factor in band]
                for name, band in BANDS[regime].items()
            }
            | {"bound": times.bound}
            for regime, times in one.modelled.items()
        }
    }


def _name(layout: estimate.Layout) -> str:
    parts = [f"TP{layout.tensor}", f"PP{layout.pipeline}", f"DP{layout.data}"]
    return " ".join(parts + (["EP"] if layout.expert else []))
