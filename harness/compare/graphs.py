# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Graph modes of vLLM on one emulated NPU and on two (TP2), compared with eager mode and with transformers.

tools/check graphs                   all modes
tools/check graphs FULL PIECEWISE    these

Each must give the tokens of NONE, and log-probabilities as close to transformers' in float32 as transformers' own in
bfloat16 are. Prints the table of docs/reports/graph-mode-tests.md.
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import checkout
from harness.engines import npus
from harness.progress import track

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
PROGRAM = checkout.PROGRAMS / "serve_graphs.py"
DRAW = random.Random(1)
PROMPTS = [
    [DRAW.randrange(3, 512) for _ in range(length)]
    for length in (5, 120, 127, 1, 250, 33, 600, 64, 17, 126, 2)
]
# Tokens of the answers: some cross the end of a block of 128 tokens.
LENGTHS = [20, 20, 12, 40, 5, 30, 9, 70, 3, 10, 25]


def serve(trace: Path, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of serve_graphs.py for each case, with the log of all."""
    asked = [{"prompts": PROMPTS, "lengths": LENGTHS} | case for case in cases]
    variables: dict[str, Any] = {
        "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": "1",
        "ASCEND_EMULATOR_TRACE": str(trace),
    }
    ranks = max(case["ranks"] for case in cases)
    done = npus.run(
        ranks, sys.executable, str(PROGRAM), json.dumps(asked), memory="2GiB", **variables
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [result | {"log": done.stdout + done.stderr} for result in npus.results(done.stdout)]


def check(result: dict[str, Any]) -> None:
    """The error against float32 is that of transformers in the engine's dtype, and each token is
    the argmax within that error."""
    errors = [error for request in result["requests"] for error in request["errors"]]
    reference_errors = [error for request in result["requests"] for error in request["own_errors"]]
    assert sum(errors) / len(errors) < 1.5 * sum(reference_errors) / len(reference_errors)
    assert max(errors) < 3 * max(reference_errors)
    assert max(regret for request in result["requests"] for regret in request["regrets"]) < 2 * max(
        errors
    )


def main() -> None:
    """The command."""
    modes = sys.argv[1:] or MODES
    if unknown := set(modes) - set(MODES):
        sys.exit(f"graphs: no mode {', '.join(unknown)}; there are {', '.join(MODES)}")
    print(
        "| mode | NPUs | tokens as NONE | mean log-probability difference | of transformers in"
        " bfloat16 | graphs a decode step |"
    )
    print("|---|---|---|---|---|---|")
    wrong = 0
    eager: Any = None
    served = [(ranks, mode) for ranks in (1, 2) for mode in dict.fromkeys(["NONE", *modes])]
    for ranks, mode in track("NPUs and modes:", served):
        eager = None if mode == "NONE" else eager
        with tempfile.TemporaryDirectory() as directory:
            (result,) = serve(Path(directory, "trace.json"), {"mode": mode, "ranks": ranks})
        tokens = [request["tokens"] for request in result["requests"]]
        eager = eager or tokens
        same = sum(
            a == b
            for one, other in zip(eager, tokens, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        count = sum(map(len, tokens))
        wrong += same != count
        check(result)
        errors, reference_errors = (
            [e for request in result["requests"] for e in request[key]]
            for key in ("errors", "own_errors")
        )
        decodes = ", ".join(map(str, sorted(set(result["launched"][1:-1]))))
        means = (
            f"{sum(errors) / len(errors):.4f} | {sum(reference_errors) / len(reference_errors):.4f}"
        )
        print(
            f"| {result['mode']} | {ranks} | {same} of {count} | {means} | {decodes} |",
            flush=True,
        )
    sys.exit(wrong > 0)
