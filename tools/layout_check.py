"""Small models, parallel layouts, and the comparison with Hugging Face: for tools/layouts and tests/test_layouts.py."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import environment

ADDER = environment.ROOT / "tools" / "models" / "adder"
PROGRAM = environment.ROOT / "tests" / "layout_cases.py"
SMALL = {"gpu_memory_utilization": 0.3, "max_num_seqs": 8, "max_num_batched_tokens": 64}
TP, PP, DP = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
EXPERTS = {"enable_expert_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": {TP: 2},
    "PP2": {PP: 2},
    "TP2 PP2": {TP: 2, PP: 2},
    "DP2": {DP: 2},
}
PROMPTS = 6


@functools.cache
def prompts(vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to 150 tokens, and how many tokens to answer with."""
    draw = random.Random(vocabulary)
    lengths = [1, 150, 7, 33, 64, 5]
    return [[draw.randrange(3, vocabulary) for _ in range(n)] for n in lengths], [6, 4, 8, 3, 5, 7]


def case(name: str, model: Path, engine: dict[str, Any], *, mp: bool = False, dtype: str = "bfloat16") -> dict[str, Any]:
    """What layout_cases.py is given: a layout under the external launcher, or under the multiprocessing executor."""
    asked, lengths = prompts(json.loads((model / "config.json").read_text())["vocab_size"])
    made = {"name": name, "model": str(model), "prompts": asked, "lengths": lengths}
    made["engine"] = SMALL | {"dtype": dtype} | engine
    return made if mp else made | {"ranks": ranks(engine)}


def ranks(engine: dict[str, Any]) -> int:
    return engine.get(TP, 1) * engine.get(PP, 1) * engine.get(DP, 1)


def results(output: str) -> dict[str, Any]:
    found = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    return {result["name"]: result for result in found}


@functools.cache
def reference(model: Path, dtype: str) -> Any:
    """Hugging Face's model with the weights as the engine has them, computing in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval().float()


def compare(model: Path, dtype: str, served: list[list[dict[str, Any]]]) -> tuple[int, int, float, float]:
    """The engine's answers under its own tokens: how many tokens, how many of them are not Hugging Face's choice, and how far the
    log-probabilities are from Hugging Face's, at most and on average. All ranks that answer a prompt answer alike."""
    import torch

    asked, lengths = prompts(reference(model, dtype).config.vocab_size)
    count, others, errors = 0, 0, []
    for prompt, length, answers in zip(asked, lengths, served, strict=True):
        assert answers, "a prompt was not answered"
        assert all(answer["tokens"] == answers[0]["tokens"] for answer in answers), "ranks have other tokens"
        tokens = answers[0]["tokens"]
        assert len(tokens) == length
        with torch.no_grad():
            logits = reference(model, dtype)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        exact = logits.float().log_softmax(-1)
        chosen = exact[torch.arange(length), torch.tensor(tokens)]
        errors.append((torch.tensor(answers[0]["logprobs"]) - chosen).abs())
        count += length
        others += int((exact.argmax(-1) != torch.tensor(tokens)).sum())
    every = torch.cat(errors)
    return count, others, float(every.max()), float(every.mean())


def main() -> None:
    """See tools/layouts."""
    parser = argparse.ArgumentParser(prog="tools/layouts", description=__doc__)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of: {', '.join(LAYOUTS)} (default: all)")
    parser.add_argument("--launcher", choices=["mp", "external"], action="append", help="default: both")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one engine")
    options = parser.parse_args()
    if unknown := set(options.layouts) - set(LAYOUTS):
        parser.error(f"no layout {', '.join(sorted(unknown))}; there are {', '.join(LAYOUTS)}")
    print("| model | layout | launcher | tokens | other than transformers' | log-probability difference: max | mean | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        for name in options.layouts or LAYOUTS:
            for launcher in options.launcher or ["mp", "external"]:
                wrong += _run(name, launcher == "mp", Path(directory), options.timeout)
    sys.exit(1 if wrong else 0)


def _run(name: str, mp: bool, directory: Path, timeout: float) -> int:
    model, dtype, engine = ADDER, "bfloat16", LAYOUTS[name]
    command = [sys.executable, str(PROGRAM), json.dumps([case(name, model, engine, mp=mp, dtype=dtype)])]
    emulator = [sys.executable, "-m", "ascend_emulator.cli", "run", "--npus", str(ranks(engine)), "--memory", "1GiB", "--"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    label = f"| {model.name} | {name} | {'mp' if mp else 'external'} |"
    try:
        done = subprocess.run([*emulator, *command], env=environ, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        print(f"{label} no answer after {timeout:g} s | | | | |", flush=True)
        return 1
    found = results(done.stdout).get(name)
    if found is None:
        print(f"{label} failed: {(done.stdout + done.stderr)[-2000:]} | | | | |", flush=True)
        return 1
    count, others, most, mean = compare(model, dtype, found["results"])
    print(f"{label} {count} | {others} | {most:.1e} | {mean:.1e} | {found['seconds']:.0f} |", flush=True)
    return others
