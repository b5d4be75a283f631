# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""tools/bench --modelled: modelled device time of a step by operator, eager, beside vllm-ascend on
the same emulated NPUs.

The times are those of the laws in docs/modelled-times.md, and no measurement. Small layers, and few
of them: what is compared are two lists of launches. Prefills have about 2,000 tokens, except for
one request.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import environment
from generated_docs.markdown import table
from harness.progress import track
from upstream_tests import incumbent

MODELS = {
    "dense": "dense",
    "experts": "experts, TP2 EP2",
    "latent": "latent attention",
    "prolog": "latent attention, mla_prolog",
}
"""Cases of harness/compare/launches.py."""
PROGRAM = environment.ROOT / "harness" / "programs" / "count_launches.py"
TOKENS, LONGEST = 2048, 512
SHOWN = 8
Summary = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tools/bench --modelled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--modelled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--incumbent", action="store_true", help="also vllm-ascend, in an environment of its own"
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=[*MODELS], help="models (all)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 32, 256],
        metavar="N",
        help="requests (1 32 256)",
    )
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="layers (2)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write Markdown there, too")
    arguments = parser.parse_args()
    if arguments.incumbent:
        incumbent.prepare()
    with tempfile.TemporaryDirectory() as directory:
        text = _text(arguments, _measured(arguments, Path(directory)))
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


def _measured(arguments: argparse.Namespace, directory: Path) -> dict[str, dict[str, Summary]]:
    """Each side's steps by case, "ours" first."""
    found: dict[str, dict[str, Summary]] = {}
    wanted = ["ours"] + ["vllm-ascend"] * arguments.incumbent
    cases = list(_cases(arguments))
    for case in track("cases:", cases):
        for side in wanted:
            found.setdefault(case["name"], {})[side] = _run(side, case, directory)
    return found


def _cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model in arguments.models:
        for batch in arguments.batch:
            prompt = min(TOKENS // batch - 1, LONGEST)
            case = _cases_of_harness()[MODELS[model]]
            sizes = {"max_num_seqs": max(batch + 1, 2), "max_num_batched_tokens": TOKENS}
            yield case | {
                "name": f"{MODELS[model]}, batch {batch}",
                "requests": batch,
                "prompt": prompt,
                "layers": [arguments.layers],
                "engine": case["engine"] | sizes,
            }


@cache
def _cases_of_harness() -> dict[str, Any]:
    """The cases by name, from a process that may import the harness."""
    program = "import json; from harness.compare import launches; print(json.dumps(launches.CASES))"
    command = [environment.PYTHON, "-c", program]
    done = subprocess.run(
        [*map(str, command)], cwd=environment.ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _run(side: str, case: dict[str, Any], directory: Path) -> Summary:
    """The steps of a case, in a process of that side."""
    if side != "ours":  # Its vLLM refuses the options of our plugin.
        options = case["engine"]
        case = case | {
            "engine": {key: options[key] for key in options if key != "additional_config"}
        }
    trace = directory / f"{side} {case['name']}.json"
    emulator = ["run", "--time", "modelled", "--npus", case["ranks"], "--memory", "6GiB"]
    emulator += ["--trace", trace, "--"]
    program = [PROGRAM, json.dumps([case])]
    variables = environment.variables()
    command: list[Any] = ["ascend-emulator", *emulator, environment.PYTHON, *program]
    if side != "ours":
        python = incumbent.VENV / "bin" / "python"
        command = [python, "-m", "ascend_emulator.cli", *emulator, python]
        command += [incumbent.ENGINE, "--null", *program]
        variables = incumbent.variables()
    paths = filter(None, [str(environment.ROOT), os.environ.get("PYTHONPATH", "")])
    variables |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HCCL_BUFFSIZE": "16",
    }
    done = subprocess.run(
        [*map(str, command)], env=variables, capture_output=True, text=True, check=False
    )
    lines = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    if done.returncode or not results:
        sys.exit(f"bench: {side} failed with {case['name']}:\n{done.stderr[-3000:]}")
    return results[0]["runs"][0]


def _text(arguments: argparse.Namespace, found: dict[str, dict[str, Summary]]) -> str:
    """The table of steps, and for each the operators with the largest differences."""
    rows, operators = [], []
    for name, by_side in found.items():
        for step in ("prefill", "decode", "mixed"):
            of = {side: Counter(runs[step]["modelled"]) for side, runs in by_side.items()}
            counts = {side: sum(runs[step]["names"].values()) for side, runs in by_side.items()}
            ours, *others = (each.total() for each in of.values())
            cells = [name, step, f"{ours:.0f}", f"{counts['ours']}"]
            for other in others:
                cells += [f"{other:.0f}", f"{counts['vllm-ascend']}", f"{ours / other:.2f}"]
                operators.append(f"- {name}, {step}: {_differences(*of.values())}")
            rows.append(cells)
    head = ["model", "step", "ours, modelled us", "launches"]
    if arguments.incumbent:
        head += ["vllm-ascend, modelled us", "launches", "ours / theirs"]
    versions = f"vllm-ascend {incumbent.VLLM_ASCEND}, " if arguments.incumbent else ""
    note = f"Modelled, not measured: {versions}{arguments.layers} layers, eager, device time."
    return "\n".join([table(head, rows), "", note, "", *operators, ""])


def _differences(ours: Counter[str], theirs: Counter[str]) -> str:
    """Operators of which one side's modelled time is longer, the largest difference first."""
    apart = {name: ours[name] - theirs[name] for name in ours | theirs}
    shown = sorted(apart, key=lambda name: -abs(apart[name]))[:SHOWN]
    return ", ".join(f"`{name}` {apart[name]:+.0f}" for name in shown if round(apart[name]))
