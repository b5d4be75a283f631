# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Loading of weights from peers: speed, engines and malformed frames, for `tools/check loading`."""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import checkout
from harness.compare import layouts
from harness.engines import npus


def checkpoint(directory: Path, layers: int = 10) -> Path:
    """A model of Qwen3's architecture with random weights, 1.27 GB in bfloat16 with ten layers, in
    files of 200 MB."""
    import torch
    import transformers

    path = directory / f"qwen3-{layers}"
    if path.exists():
        return path
    config = transformers.Qwen3Config(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = transformers.Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.uniform_(weight, -0.05, 0.05)
    model.save_pretrained(path, max_shard_size="200MB")
    return path


def speed(directory: Path, rounds: int) -> None:
    model = checkpoint(directory)
    program = checkout.PROGRAMS / "measure_loading.py"
    done = npus.run(
        2, sys.executable, str(program), str(model), str(rounds), memory="6GiB", timeout=1800
    )
    print(done.stderr[-20000:], file=sys.stderr)
    if done.returncode:
        sys.exit(done.stdout[-3000:])
    (result,) = npus.results(done.stdout)
    plain, between = (
        statistics.median(result["found"][f"plain TCP {which}GB/s"])
        for which in ("", "between NPUs ")
    )
    print(f"{result['size'] / 1e9:.2f} GB; medians of {rounds} rounds\n")
    print(
        "| strategy | seconds | GB/s | of a plain TCP copy from NPU to NPU | from host to host |\n|"
        " --- | --- | --- | --- | --- |"
    )
    for name, values in result["found"].items():
        if name.endswith("GB/s"):
            continue
        rate = statistics.median(result["found"][f"{name} GB/s"])
        share = f"{rate / between:.2f} | {rate / plain:.2f}" if name.startswith("peer") else "|"
        print(f"| {name} | {statistics.median(values):.2f} | {rate:.2f} | {share} |")
    print(
        f"| plain TCP copy, NPU to NPU | {result['size'] / 1e9 / between:.2f} | {between:.2f} | 1 |"
        f" {between / plain:.2f} |"
    )
    print(
        f"| plain TCP copy, host to host | {result['size'] / 1e9 / plain:.2f} | {plain:.2f} | | 1 |"
    )
    sums = {*result["sums"].values()}
    print(f"\nsums of the weights' magnitudes: {sums if len(sums) > 1 else 'all the same'}")
    if len(sums) > 1:
        sys.exit("tools/check loading: strategies have loaded different weights")


def engines(ranks: int) -> None:
    """Two engines of `ranks` NPUs, the second with weights from the first, both compared with
    transformers."""
    program = checkout.PROGRAMS / "serve_loaded_weights.py"
    case = layouts.case(
        "engines", layouts.ADDER, {"tensor_parallel_size": ranks} if ranks > 1 else {}, mp=True
    )
    done = npus.run(
        2 * ranks, sys.executable, str(program), json.dumps(case), str(ranks), timeout=900
    )
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-6000:])
    print(
        "\n".join(
            line
            for line in done.stdout.splitlines()
            if "weights loaded from peer" in line or "serving" in line
        )
    )
    first, second = npus.results(done.stdout)
    for name, answers in {"from the checkpoint": first, "from the peer": second}.items():
        count, mismatches, max_diff, mean = layouts.compare(layouts.ADDER, "bfloat16", answers)
        print(
            f"{ranks} ranks, {name}: {count} tokens, {mismatches} not transformers' choice; difference"
            f" {max_diff:.1e}, mean {mean:.1e}"
        )
    print("the two engines' answers are", "the same" if first == second else "different")


def fuzz(seconds: float, seed: int) -> None:
    from harness.weights import fuzz as weight_fuzz  # which imports torch

    counts = weight_fuzz.fuzz(seconds, seed, lambda line: print(line, flush=True))
    print(
        f"seed {seed}, {seconds:g} s:"
        f" {', '.join(f'{name}: {count}' for name, count in sorted(counts.items()))}"
    )


def main() -> None:
    """See tools/check loading."""
    parser = argparse.ArgumentParser(prog="tools/check loading", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "speed",
        help="a checkpoint of 1.27 GB by each strategy, and a plain TCP copy of as many bytes",
    )
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument(
        "--directory", type=Path, help="where the checkpoint is kept (a temporary directory)"
    )
    command = commands.add_parser("fuzz", help="malformed frames to a server and to a client")
    command.add_argument("--seconds", type=float, default=600)
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser(
        "engines",
        help="tokens of an engine that has its weights from another, against transformers",
    )
    command.add_argument(
        "--ranks", type=int, default=2, help="of tensor parallelism, in each of the two engines"
    )
    given = parser.parse_args()
    if given.command == "fuzz":
        fuzz(given.seconds, given.seed)
        return
    if given.command == "engines":
        engines(given.ranks)
        return
    with tempfile.TemporaryDirectory() as temporary:
        speed(given.directory or Path(temporary), given.rounds)
