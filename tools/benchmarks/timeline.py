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
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, ROW, TOP, LEGEND, COLUMNS = 400, 60, 24, 34, 70, 18, 3
"""Units of the image, which is read on telephones, too."""
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
from harness import trace
from harness.launches import DENSE
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
    scale = (WIDTH - LEFT - RIGHT) / span
    streams = sorted({event["args"]["stream"] for event in events})
    laws = sorted({event["args"]["law"] for event in events})
    height = TOP + ROW * len(streams) + 40 + LEGEND * (1 + len(laws) // COLUMNS)
    parts = [
        f'<text x="10" y="20" font-weight="bold">Decode step, {span:.0f} us: modelled, not'
        " measured</text>",
        '<text x="10" y="37">16 requests of 512 tokens, two layers of the size of</text>',
        '<text x="10" y="52">Qwen3-0.6B in a graph, Ascend910B1</text>',
    ]
    for row, stream in enumerate(streams):
        y = TOP + ROW * row
        parts.append(f'<text x="10" y="{y + 20}">stream {stream}</text>')
        for event in (each for each in events if each["args"]["stream"] == stream):
            x, width = LEFT + (event["ts"] - begin) * scale, max(event["dur"] * scale, 0.5)
            name = f"{event['name']} {event['dur']:.1f} us, modelled, law: {event['args']['law']}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 6}" stroke="#fff"'
                f' stroke-width="0.3" fill="{color(event["args"]["law"])}">'
                f"<title>{escape(name)}</title></rect>"
            )
    axis = TOP + ROW * len(streams) + 14
    for part in range(5):
        x = LEFT + span * part / 4 * scale
        parts.append(
            f'<text x="{x:.0f}" y="{axis}" text-anchor="middle">{span * part / 4:.0f} us</text>'
        )
    for number, law in enumerate(laws):
        x, y = 10 + 130 * (number % COLUMNS), axis + 14 + LEGEND * (number // COLUMNS)
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{color(law)}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 11}">{escape(law or "no law")}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/decode-timeline.svg"))
    parser.add_argument("--trace", type=Path, help="keep the trace, for Perfetto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        options.output.write_text(svg(step(options.trace or Path(directory, "trace.json"))))
