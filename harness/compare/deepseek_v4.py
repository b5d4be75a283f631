# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""DeepSeek-V4 in each parallel layout, eager and with decodes in graphs, with and without drafts by
MTP, compared with transformers in float32: `tools/check deepseek_v4`."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from harness import checkout
from harness.compare.families import EXACT
from harness.compare.layouts import DP, EP, PP, TP
from harness.engines import npus
from harness.models import deepseek_v4

PROGRAM = checkout.PROGRAMS / "serve_deepseek_v4.py"
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": {TP: 2},
    "TP2 EP2": {TP: 2} | EP,
    "PP2": {PP: 2},
    "DP2": {DP: 2},
    "DP2 EP2": {DP: 2} | EP,
    "TP2 DP2 EP4": {TP: 2, DP: 2} | EP,
    "TP2 PP2": {TP: 2, PP: 2},
}
GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "decodes in graphs": {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_capture_sizes": [4, 8, 12, 16]},
    },
}
DRAFTS = (0, 1, 2, 3)


def is_served(layout: str, drafts: int) -> bool:
    """Drafters follow no pipeline."""
    return not (drafts and PP in LAYOUTS[layout])


def case(folder: Path, layout: str, graphs: str, drafts: int) -> dict[str, Any]:
    """Arguments of serve_deepseek_v4.py."""
    parallel, draw = LAYOUTS[layout], random.Random(7)
    engine = {"dtype": "float32", "max_num_batched_tokens": 90 if not drafts else 1024}
    wanted: dict[str, Any] = {
        "name": f"{layout} | {graphs} | {drafts}",
        "model": str(folder),
        "mutations": [],
        "ranks": parallel.get(TP, 1) * parallel.get(PP, 1) * parallel.get(DP, 1),
        "layout": parallel,
        "engine": engine | GRAPHS[graphs],
        "batches": [[[draw.randrange(2, 256) for _ in range(n)] for n in (300, 7, 135, 61, 290)]],
        "length": 12,
    }
    if drafts:
        wanted["engine"]["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": drafts,
        }
        if wanted["ranks"] == 1:
            wanted["drafts"] = str(folder / "mtp")
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/check deepseek_v4", description=__doc__)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--graphs", action="append", choices=GRAPHS)
    parser.add_argument("--drafts", action="append", type=int, choices=DRAFTS)
    options = parser.parse_args()
    chosen = product(options.layout or LAYOUTS, options.graphs or GRAPHS, options.drafts or DRAFTS)
    failed = False
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        deepseek_v4.write(folder, embedding=8)
        cases = [case(folder, *each) for each in chosen if is_served(each[0], each[2])]
        file = folder / "cases.json"
        file.write_text(json.dumps(cases))
        done = npus.run(4, sys.executable, str(PROGRAM), str(file), memory="4GiB", timeout=7200)
    print("| layout | decodes | drafts a step | tokens | others | largest difference | accepted |")
    print(f"|{'---|' * 7}")
    for name, result in npus.by_name(done).items():
        counted = f"{result['tokens']} | {result['others']} | {result['most']:.1e}"
        print(f"| {name} | {counted} | {result['accepted']} |")
        is_wrong = result["others"] or result["most"] > EXACT or result.get("other drafts")
        failed |= bool(is_wrong)
    sys.exit(failed)
