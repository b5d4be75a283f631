# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Families of models of ascend-models, served by a program of their family (serve_family.py) and
compared with transformers.

`tools/check families` runs the tests of ascend-models with every case; by itself, a test leaves out
those with ``whole``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import every_case
from harness.engines import npus

EXACT = 1e-4
"""In float32, the most that a log-probability differs by."""


def cases(every: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those to serve in this run."""
    is_wanted = every_case.is_wanted()
    return {name: case for name, case in every.items() if is_wanted or not case.get("whole")}


def prompts(tokens: tuple[int, int], *sizes: int, start: tuple[int, ...] = ()) -> list[list[int]]:
    """Random prompts, the same for the same arguments.

    Args:
        tokens: the first token that is drawn, and the first above those that are.
        sizes: tokens that are drawn for each prompt.
        start: tokens that each prompt begins with.
    """
    import torch

    random = torch.Generator().manual_seed(5)
    return [[*start, *torch.randint(*tokens, (n,), generator=random).tolist()] for n in sizes]


def serve(program: Path, folder: Path, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of cases by their names, on at most two NPUs; ``folder`` is for their file."""
    file = folder / "cases.json"
    file.write_text(json.dumps([{"mutations": [], **case} for case in cases]))
    done = npus.run(2, sys.executable, str(program), str(file), memory="4GiB", timeout=1500)
    return npus.by_name(done)


def main() -> None:
    """Run the tests of ascend-models with every case."""
    every_case.run("packages/ascend-models/tests")
