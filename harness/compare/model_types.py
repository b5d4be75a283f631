# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models by type of attention and task, compared with Hugging Face: `tools/check model_types` and
e2e/test_model_types.py."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness import checkout
from harness.engines import npus
from harness.models import by_type as models
from harness.models.served_types import KINDS
from harness.progress import Progress, progress
from harness.references import log_probabilities, near_ties, perturbed

PROGRAM = checkout.PROGRAMS / "serve_model_types.py"
EXACT = 1e-4
"""In float32, the most that a log-probability differs by, unless a choice of experts or tokens is a
tie."""
QUESTIONS = ["2+2=", "what is it"], ["4", "a thing that is"]


def make(name: str, directory: Path) -> Path:
    """Write a type's model to the directory, unless it exists."""
    import torch

    path = directory / name.replace(" ", "-").replace(",", "")
    if not path.exists():
        torch.manual_seed(0)
        KINDS[name].write(path, name)
    return path


def case(
    name: str,
    directory: Path,
    ranks: int,
    dtype: str,
    engine: dict[str, Any] | None = None,
    batch: bool = False,
) -> dict[str, Any]:
    """Arguments of serve_model_types.py for one model, with a few prompts or a batch of 32."""
    kind = KINDS[name]
    asked: list[Any]
    asked, lengths = models.batch() if batch else models.prompts()
    if batch:
        engine = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "max_model_len": 640} | (
            engine or {}
        )
    if kind.media == "image":
        asked, lengths = ["what is <image>?", "<image> or <image>: how many", "1+1="], [6, 5, 4]
    if kind.media == "audio":
        asked, lengths = [[3, 4 + i, 5] for i in range(3)], [6, 5, 7]
    options = {
        "name": name,
        "model": str(make(name, directory)),
        "task": kind.task,
        "ranks": ranks,
        "dtype": dtype,
    }
    options |= {
        "prompts": asked,
        "lengths": lengths,
        "engine": kind.engine | (engine or {}),
        "media": kind.media,
    }
    return options | {"pairs": QUESTIONS}


def reference(name: str, case: dict[str, Any]) -> Callable[[int, tuple[int, ...]], Any]:
    """Hugging Face's logits ``[tokens, vocabulary]`` for an answer's tokens, with the engine's
    weights, in float32."""
    import torch
    import transformers

    dtype, path = getattr(torch, case["dtype"]), case["model"]
    if KINDS[name].media == "image":
        model = (
            transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
            .eval()
            .float()
        )
        processor = transformers.AutoProcessor.from_pretrained(path)
    elif KINDS[name].media == "audio":
        model = (
            transformers.WhisperForConditionalGeneration.from_pretrained(path, dtype=dtype)
            .eval()
            .float()
        )
        extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
    else:
        model = models.causal(Path(path), dtype).float()

    @functools.cache  # The second answers are nearly always equal to the first ones.
    def logits(number: int, tokens: tuple[int, ...]) -> Any:
        prompt, more = case["prompts"][number], {}
        if KINDS[name].media == "image":
            drawn = models.pictures(prompt, number)
            inputs = processor(text=prompt, images=drawn or None, return_tensors="pt")
            prompt = inputs.pop("input_ids")[0].tolist()
            inputs.pop("attention_mask")
            more = dict(inputs)
            if (types := more.get("mm_token_type_ids")) is not None:
                more["mm_token_type_ids"] = torch.nn.functional.pad(types, (0, len(tokens)))
        all_tokens = torch.tensor([prompt + list(tokens)])
        with torch.no_grad():
            if KINDS[name].media == "audio":
                heard = extractor(
                    models.sound(number),
                    sampling_rate=models.SAMPLING_RATE,
                    return_tensors="pt",
                )
                output = model(input_features=heard["input_features"], decoder_input_ids=all_tokens)
            else:
                output = model(input_ids=all_tokens, **more)
        return output.logits[0, len(prompt) - 1 : -1].float()

    return logits


def pooled(name: str, case: dict[str, Any]) -> list[list[float]]:
    """Hugging Face's embeddings, class probabilities or scores, in float32 of the weights as the
    engine has them."""
    import torch
    import transformers

    dtype = getattr(torch, case["dtype"])
    if KINDS[name].task == "embed":
        model = transformers.AutoModel.from_pretrained(case["model"], dtype=dtype).eval().float()
    else:
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(case["model"], dtype=dtype).eval().float()
    out = []
    with torch.no_grad():
        if KINDS[name].task == "score":
            tokenizer = models.tokenizer()
            for pair in zip(*case["pairs"], strict=True):
                out.append(
                    model(**tokenizer(*pair, return_tensors="pt")).logits[0].sigmoid().tolist()
                )
            return out
        for prompt in case["prompts"]:
            output = model(input_ids=torch.tensor([prompt]))
            if KINDS[name].task == "classify":
                out.append(output.logits[0].softmax(-1).tolist())
            else:
                last = output.last_hidden_state[0, -1 if "qwen3" in name else 0]
                out.append((last / last.norm()).tolist())
    return out


def own_answers(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Hugging Face's answers in the case's dtype, in the form of serve_model_types.py: a measure of
    that dtype's roundings."""
    import torch

    model = models.causal(Path(case["model"]), getattr(torch, case["dtype"]))
    answers = []
    for prompt, length in zip(case["prompts"], case["lengths"], strict=True):
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(length):
            with torch.no_grad():
                last = (
                    model(input_ids=torch.tensor([prompt + tokens]))
                    .logits[0, -1]
                    .float()
                    .log_softmax(-1)
                )
            tokens.append(int(last.argmax()))
            logprobs.append(float(last.max()))
        answers.append({"tokens": tokens, "logprobs": logprobs})
    return answers * 2


class Comparison(NamedTuple):
    """The engine's answers beside Hugging Face's."""

    num_compared: int
    """Tokens, or numbers of embeddings and scores."""
    num_mismatches: int
    """Tokens that are not Hugging Face's choice."""
    max_regret: float
    """Largest difference between Hugging Face's log-probability of its choice and of the engine's
    token."""
    max_diff: float
    """Largest difference between the engine's and Hugging Face's log-probabilities, or numbers."""
    mean_diff: float
    """Mean of these differences."""


def compare(name: str, case: dict[str, Any], results: list[Any]) -> Comparison:
    """The engine's answers and Hugging Face's: log-probabilities under the engine's own tokens, or
    embeddings, or scores."""
    import torch

    if case["task"] != "generate":
        got, exact = torch.tensor(results), torch.tensor(pooled(name, case))
        assert got.shape == exact.shape, (got.shape, exact.shape)
        return Comparison(
            got.numel(), 0, 0.0, float((got - exact).abs().max()), float((got - exact).abs().mean())
        )
    logits = reference(name, case)
    errors, regrets = [], []
    assert len(results) == 2 * len(case["prompts"])
    for number, answer in zip([*range(len(case["prompts"]))] * 2, results, strict=True):
        tokens = torch.tensor(answer["tokens"])
        assert len(tokens) == case["lengths"][number]
        exact = logits(number, tuple(answer["tokens"])).log_softmax(-1)
        chosen = exact[torch.arange(len(tokens)), tokens]
        errors.append((torch.tensor(answer["logprobs"]) - chosen).abs())
        regrets.append(exact.max(-1).values - chosen)
    every, regret = torch.cat(errors), torch.cat(regrets)
    return Comparison(
        len(every),
        int((regret > 0).sum()),
        float(regret.max()),
        float(every.max()),
        float(every.mean()),
    )


def unexplained(case: dict[str, Any], results: list[Any]) -> tuple[int, float]:
    """As ``perturbed.unexplained``, of the answers to each prompt that are not the same; in float32,
    what ties do not explain."""
    import torch

    model = models.causal(Path(case["model"]), getattr(torch, case["dtype"]))
    answers = {
        json.dumps([prompt, answer]): (prompt, answer)
        for prompt, answer in zip(case["prompts"] * 2, results, strict=True)
    }
    if case["dtype"] == "float32":

        def difference(prompt: list[int], answer: dict[str, Any]) -> float:
            return log_probabilities.distance(model, prompt, answer)[1]

        left = [
            near_ties.unexplained(functools.partial(difference, *each), EXACT)[0]
            for each in answers.values()
        ]
        return sum(difference_left > EXACT for difference_left in left), max(left)
    asked = [{"prompt": prompt} for prompt, _ in answers.values()]
    return perturbed.unexplained(
        model.float(), asked, [[answer] for _, answer in answers.values()], case["dtype"]
    )


def run(
    cases: list[dict[str, Any]],
    plugins: str = "",
    timeout: float = 900,
    progress: Progress | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # too long for an argument
        json.dump(cases, file)
        file.flush()
        command, ranks = (
            [sys.executable, str(PROGRAM), file.name],
            max(case["ranks"] for case in cases),
        )
        variables = {"VLLM_PLUGINS": plugins, "OMP_NUM_THREADS": "1"} | variables
        return npus.run(ranks, *command, timeout=timeout, progress=progress, **variables)


def main() -> None:
    """See tools/check model_types."""
    parser = argparse.ArgumentParser(prog="tools/check model_types", description=__doc__)
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help="beginnings of names; default: all"
    )
    parser.add_argument(
        "--npus",
        type=int,
        choices=[1, 2],
        action="append",
        help="default: both, by tensor parallelism",
    )
    parser.add_argument(
        "--attention",
        choices=["fused", "built-in", "transformers"],
        action="append",
        help="default: fused",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--chip", default="Ascend910B1", help="default: %(default)s")
    parser.add_argument(
        "--batch", action="store_true", help="a batch of 32 prompts of 1 to 600 tokens (decoders)"
    )
    parser.add_argument(
        "--roundings",
        action="store_true",
        help="what roundings of the reference do not explain, in two columns",
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="options of the engine, in JSON"
    )
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    names = [
        name
        for name in KINDS
        if not options.kinds or any(name.startswith(start) for start in options.kinds)
    ]
    if not names:
        parser.error(f"unknown model type; supported are {'; '.join(KINDS)}")
    columns = [
        "kind",
        "attention",
        "NPUs",
        "graphs",
        "tokens or numbers",
        "not transformers' choice",
        "short of it by",
    ]
    columns += [
        "difference: max",
        "mean",
        *(["unexplained tokens", "difference"] if options.roundings else []),
    ]
    print(f"| {' | '.join([*columns, 'seconds'])} |\n|{'---|' * (len(columns) + 1)}")
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(os.environ.get("KINDS_MODELS", temporary))
        for attention in options.attention or ["fused"]:
            for ranks in options.npus or [1, 2]:
                cases = {
                    name: case(name, directory, ranks, options.dtype, options.engine, options.batch)
                    for name in names
                    if ranks <= KINDS[name].max_npus
                    and KINDS[name].served_by[attention == "built-in"]
                }
                if attention == "transformers":
                    for name in (
                        name
                        for name in cases
                        if KINDS[name].task == "generate" and not KINDS[name].media
                    ):
                        record = {
                            "results": own_answers(cases[name]),
                            "differs": "",
                            "kinds": [attention],
                            "graphs": "",
                            "seconds": 0,
                        }
                        print(_row(name, cases[name], record, options.roundings), flush=True)
                    continue
                with progress(f"{attention} attention, {ranks} NPUs:", len(cases)) as steps:
                    plugins = "" if attention == "fused" else "ascend"
                    done = run(
                        list(cases.values()),
                        plugins,
                        300 * len(cases),
                        steps,
                        ASCEND_EMULATOR_SOC=options.chip,
                    )
                result = {each["name"]: each for each in npus.results(done.stdout)}
                if options.verbose or len(result) < len(cases):
                    print(done.stdout[-6000:] + done.stderr[-9000:])
                failed += len(cases) - len(result)
                for name, each in result.items():
                    print(_row(name, cases[name], each, options.roundings), flush=True)
    sys.exit(1 if failed else 0)


def _row(name: str, case: dict[str, Any], served: dict[str, Any], roundings: bool) -> str:
    comparison = compare(name, case, served["results"])
    assert not served["differs"], f"{name}: {served['differs']}"
    by = ", ".join(kind.removesuffix("Impl") for kind in served["kinds"])
    cells = [
        name,
        by,
        case["ranks"],
        served["graphs"],
        comparison.num_compared,
        comparison.num_mismatches,
        f"{comparison.max_regret:.3f}",
    ]
    cells += [f"{comparison.max_diff:.4f}", f"{comparison.mean_diff:.4f}"]
    if roundings:
        mismatches, difference = unexplained(case, served["results"])
        cells += [mismatches, f"{difference:.4f}"]
    cells.append(f"{served['seconds']:.0f}")
    return f"| {' | '.join(map(str, cells))} |"
