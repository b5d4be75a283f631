# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Draw the modelled timeline of a decode step in a graph, from the emulator's trace.

    tools/bench timeline --output docs/decode-timeline.svg

A model of two layers of the size of Qwen3-0.6B decodes 16 requests; the trace itself opens in
Perfetto (`--trace FILE` keeps it).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import plot
from matplotlib.patches import Patch

COLUMNS = 3
"""Of the legend."""
COLORS = {
    "matmul": "#1f6feb",
    "attention": "#8250df",
    "norm": "#1a7f37",
    "activation": "#9a6700",
    "rope": "#bf3989",
    "scatter": "#e085b0",
    "argmax": "#d1242f",
    "sampling": "#d1242f",
    "AI CPU": "#000000",
    "copy": "#6e7781",
    "elementwise": "#54aeff",
    "": "#ffb77c",
}
"""By law; the last one is of operators without a law."""

PROGRAM = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from harness.engines import trace
from harness.compare.launches import DENSE
from transformers import AutoConfig
from vllm import LLM, SamplingParams
directory, layers, requests, prompt = sys.argv[1], *map(int, sys.argv[2:])
config = AutoConfig.for_model(**DENSE | {"num_hidden_layers": layers, "vocab_size": 151936})
config.save_pretrained(directory)
engine = LLM(
    directory, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=1024,
    gpu_memory_utilization=0.3, max_num_seqs=requests, async_scheduling=False,
    max_num_batched_tokens=requests * prompt, enable_prefix_caching=False,
    num_gpu_blocks_override=requests * (prompt // 128 + 2) + 8,  # for all requests at a time
    compilation_config={"cudagraph_capture_sizes": [requests]},
).llm_engine
wanted = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)
for request in range(requests):
    engine.add_request(str(request), {"prompt_token_ids": [3] * prompt}, wanted)
for _ in range(4):
    engine.step()
before = len(trace.events())
engine.step()
print("STEP", json.dumps(trace.events()[before:]))
"""


def step(
    trace: Path, layers: int = 2, requests: int = 16, prompt: int = 512
) -> list[dict[str, Any]]:
    """The events of a decode step on the NPU, on the modelled clock."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["-m", "ascend_emulator.cli", "run", "--time", "modelled", "--trace", str(trace)]
        sizes = [str(size) for size in (layers, requests, prompt)]
        done = subprocess.run(
            [sys.executable, *command, "--", sys.executable, "-c", PROGRAM, directory, *sizes],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("STEP "))
    events = json.loads(line.removeprefix("STEP "))
    return [
        event for event in events if event["args"].get("modelled_us") and "law" in event["args"]
    ]


def color(law: str) -> str:
    return next((value for name, value in COLORS.items() if name and name in law), COLORS[""])


def svg(events: list[dict[str, Any]]) -> str:
    """Streams from top to bottom, time from left to right."""
    begin = min(event["ts"] for event in events)
    span = max(event["ts"] + event["dur"] for event in events) - begin
    streams = sorted({event["args"]["stream"] for event in events})
    laws = sorted({event["args"]["law"] for event in events})
    with plot.style():
        figure, axes = plot.axes(130 + 34 * len(streams) + 18 * -(-len(laws) // COLUMNS))
        for law in laws:
            for row, stream in enumerate(streams):
                bars = [
                    (event["ts"] - begin, event["dur"])
                    for event in events
                    if (event["args"]["stream"], event["args"]["law"]) == (stream, law)
                ]
                axes.broken_barh(
                    bars, (row - 0.4, 0.8), facecolor=color(law), edgecolor="white", linewidth=0.3
                )
        axes.set_title(
            f"Decode step, {span:.0f} us: modelled, not measured\n16 requests of 512 tokens, two"
            " layers of the\nsize of Qwen3-0.6B in a graph, Ascend910B1",
            loc="left",
        )
        axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
        axes.invert_yaxis()
        axes.set_xlim(0, span)
        axes.set_xlabel("us")
        figure.legend(
            [Patch(color=color(law)) for law in laws],
            [law or "no law" for law in laws],
            loc="outside lower left",
            ncols=COLUMNS,
            handlelength=1,
            columnspacing=1,
        )
        return plot.written(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/decode-timeline.svg"))
    parser.add_argument("--trace", type=Path, help="keep the trace, for Perfetto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        options.output.write_text(svg(step(options.trace or Path(directory, "trace.json"))))
