#!/usr/bin/env python3
"""Serve the same requests with each of vLLM's graph modes, on one emulated NPU and on two (TP2), and compare.

tools/graphs                   all modes
tools/graphs FULL PIECEWISE    these

Each must give the tokens of NONE, and log-probabilities as close to transformers' in float32 as transformers' own in bfloat16 are.
Prints the table of docs/graphs.md.
"""

import environment

environment.enter()

import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

sys.path.insert(0, str(environment.ROOT / "tests"))

from ascend_emulator.activation import activate  # noqa: E402

activate()  # so that the NPUs of npus.run are emulated

import test_graphs  # noqa: E402

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def main() -> int:
    modes = sys.argv[1:] or MODES
    if unknown := set(modes) - set(MODES):
        sys.exit(f"graphs: no mode {', '.join(unknown)}; there are {', '.join(MODES)}")
    print("| mode | NPUs | tokens as NONE | mean log-probability difference | of transformers in bfloat16 | graphs a decode step |")
    print("|---|---|---|---|---|---|")
    wrong = 0
    for ranks in (1, 2):
        eager = None
        for mode in dict.fromkeys(["NONE", *modes]):
            with tempfile.TemporaryDirectory() as directory:
                result = test_graphs.serve(Path(directory, "trace.json"), mode=mode, ranks=ranks)
            tokens = [request["tokens"] for request in result["requests"]]
            eager = eager or tokens
            same = sum(a == b for one, other in zip(eager, tokens, strict=True) for a, b in zip(one, other, strict=True))
            count = sum(map(len, tokens))
            wrong += same != count
            test_graphs.check(result)
            errors, own = ([e for request in result["requests"] for e in request[key]] for key in ("errors", "own_errors"))
            decodes = ", ".join(map(str, sorted(set(result["launched"][1:-1]))))
            print(
                f"| {result['mode']} | {ranks} | {same} of {count} | {sum(errors) / len(errors):.4f} | {sum(own) / len(own):.4f} | {decodes} |",
                flush=True,
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
