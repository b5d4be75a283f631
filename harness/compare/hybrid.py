# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models with states, served in each way that the documentation names, compared with Hugging Face:
`tools/check hybrid`."""

from __future__ import annotations

import argparse
import functools
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from harness import checkout
from harness.compare import layouts
from harness.engines import npus
from harness.models import by_type, hybrid
from harness.progress import Progress, progress

PROGRAM = checkout.PROGRAMS / "serve_hybrid.py"
KEPT = checkout.TOOLS / "generated_docs" / "hybrid.json"
CHUNKED = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
EAGER = CHUNKED | {"enforce_eager": True}
FLOAT32, BFLOAT16 = {"mamba_ssm_cache_dtype": "float32"}, {"mamba_ssm_cache_dtype": "bfloat16"}
GLM5_NEXT = {"language_model_only": True}
LONGEST = 600
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}
ACCEPTED = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5]}
"""Whatever they are: a random model's drafts are hardly ever right, and states after accepted ones
would not be seen."""


class Way(NamedTuple):
    """engine: its options. plugins: VLLM_PLUGINS. model: of models/hybrid.py. drafts: with an MTP
    layer.

    dtypes: of the model; float32 decides, and bfloat16 is what CANN's operators take.
    """

    engine: dict[str, Any]
    plugins: str = ""
    model: str = "Qwen3-Next"
    drafts: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


MORE_MODELS = (
    *("Qwen3.5", "Qwen3.5-MoE", "OLMo-hybrid", "Falcon-H1", "Nemotron-H", "Granite 4", "Jamba"),
    *("LFM2", "LFM2-MoE", "Mamba", "Falcon-Mamba", "Mamba 2", "Kimi-Linear"),
)
"""Models besides Qwen3-Next."""
WITHOUT_PIPELINE = {"Granite 4", "Mamba 2"}
"""vLLM 0.32 loads all layers' weights of the one in each stage (`KeyError`), and does not support
the other."""
WAYS: dict[str, Way] = {
    "eager": Way(EAGER),
    "graphs, sleep": Way(CHUNKED | {"enable_sleep_mode": True}),
    "steps of 1024 tokens": Way(CHUNKED | {"max_num_batched_tokens": 1024}),
    "float32 states": Way(CHUNKED | FLOAT32, dtypes=("bfloat16",)),
    "without ascend-attention": Way(CHUNKED, plugins="ascend", dtypes=("bfloat16",)),
    "few blocks": Way(EAGER | {"num_gpu_blocks_override": 13}),
    "prefix caching": Way(CHUNKED | {"enable_prefix_caching": True}),
    "MTP, 2 draft tokens": Way(CHUNKED | {"speculative_config": DRAFTS}, drafts=True),
    "MTP, drafts accepted as they are": Way(
        CHUNKED | {"speculative_config": DRAFTS | ACCEPTED}, drafts=True
    ),
    "TP2": Way(CHUNKED | {layouts.TP: 2}),
    "PP2": Way(CHUNKED | {layouts.PP: 2}, model=f"Qwen3-Next{hybrid.HALVES}"),
    "DP2 EP2": Way(CHUNKED | {layouts.DP: 2} | layouts.EP),
    "Qwen3.5, bfloat16 states": Way(CHUNKED | BFLOAT16, model="Qwen3.5", dtypes=("bfloat16",)),
    "Kimi-Linear, eager, few blocks": Way(
        EAGER | {"num_gpu_blocks_override": 13}, model="Kimi-Linear", dtypes=("float32",)
    ),
    "Kimi-Linear, prefix caching": Way(
        CHUNKED | {"enable_prefix_caching": True}, model="Kimi-Linear", dtypes=("float32",)
    ),
    "Kimi-Linear, DP2 EP2": Way(
        CHUNKED | {layouts.DP: 2} | layouts.EP, model="Kimi-Linear", dtypes=("float32",)
    ),
    "GLM-5-next": Way(CHUNKED | GLM5_NEXT, model=hybrid.PUBLISHED),
    "GLM-5-next, eager": Way(EAGER | GLM5_NEXT, model=hybrid.PUBLISHED, dtypes=("float32",)),
    "GLM-5-next, prefix caching": Way(
        CHUNKED | GLM5_NEXT | {"enable_prefix_caching": True},
        model=hybrid.PUBLISHED,
        dtypes=("float32",),
    ),
    "GLM-5-next, TP2": Way(
        CHUNKED | GLM5_NEXT | {layouts.TP: 2}, model=hybrid.PUBLISHED, dtypes=("float32",)
    ),
    "GLM-5-next, DP2 EP2": Way(
        CHUNKED | GLM5_NEXT | {layouts.DP: 2} | layouts.EP,
        model=hybrid.PUBLISHED,
        dtypes=("float32",),
    ),
    "Nemotron-H, bfloat16 states": Way(
        CHUNKED | BFLOAT16, model="Nemotron-H", dtypes=("bfloat16",)
    ),
    **{model: Way(CHUNKED, model=model) for model in MORE_MODELS},
    **{
        f"{model}, TP2": Way(CHUNKED | {layouts.TP: 2}, model=model, dtypes=("float32",))
        for model in MORE_MODELS
    },
    **{
        f"{model}, PP2": Way(
            CHUNKED | {layouts.PP: 2},
            model=in_both if (in_both := f"{model}{hybrid.HALVES}") in hybrid.MODELS else model,
            dtypes=("float32",),
        )
        for model in MORE_MODELS
        if model not in WITHOUT_PIPELINE
    },
}


@functools.cache
def prompts() -> tuple[list[list[int]], list[int]]:
    """32 prompts of 1 to 600 tokens, and the number of tokens to generate for each."""
    draw = random.Random(0)
    lengths = [
        1,
        2,
        63,
        64,
        65,
        128,
        129,
        300,
        LONGEST,
        *(draw.randrange(1, 150) for _ in range(23)),
    ]
    return [[draw.randrange(3, 512) for _ in range(n)] for n in lengths], [
        3 + n % 6 for n in range(len(lengths))
    ]


def case(name: str, directory: Path, dtype: str) -> dict[str, Any]:
    """Arguments of serve_hybrid.py."""
    way = WAYS[name]
    asked, lengths = prompts()
    model = hybrid.make(way.model, directory, drafts=way.drafts)
    return {
        "name": name,
        "model": str(model),
        "ranks": layouts.ranks(way.engine),
        "engine": way.engine | {"dtype": dtype},
        "prompts": asked,
        "lengths": lengths,
    }


def compare(model: Path, dtype: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """How the answers differ from Hugging Face's model in float32; in bfloat16 also how that model
    in bfloat16 does for them."""
    served = [
        (int(number), answer)
        for rank in ranks
        for part in rank["answers"].values()
        for number, answer in part.items()
    ]
    exact = _logprobs(layouts.reference(model, dtype))
    distance = _distance(exact, served)
    if dtype != "float32":
        rounded = _logprobs(_rounded(model, dtype))
        distance["transformers"] = _distance(
            exact, [(number, _answer(rounded, number, answer)) for number, answer in served]
        )
    return distance


def _distance(exact: Any, served: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """The number of tokens, how many are not the exact model's choice, and how far
    log-probabilities are off."""
    import torch

    asked, lengths = prompts()
    errors, mismatches = [], 0
    for number, answer in served:
        tokens = torch.tensor(answer["tokens"])
        assert len(tokens) == lengths[number]
        logprobs = exact(tuple(asked[number]), tuple(answer["tokens"]))
        errors.append(
            (torch.tensor(answer["logprobs"]) - logprobs[torch.arange(len(tokens)), tokens]).abs()
        )
        mismatches += int(
            (logprobs.argmax(-1) != torch.tensor(answer.get("choice", answer["tokens"]))).sum()
        )
    every = torch.cat(errors)
    return {
        "tokens": len(every),
        "others": mismatches,
        "most": float(every.max()),
        "mean": float(every.mean()),
    }


def _answer(logprobs: Any, number: int, answer: dict[str, Any]) -> dict[str, Any]:
    """A model's judgement of an engine's tokens: their log-probabilities, and its own choice at
    each position."""
    import torch

    logprobs_of = logprobs(tuple(prompts()[0][number]), tuple(answer["tokens"]))
    of_tokens = logprobs_of[torch.arange(len(logprobs_of)), torch.tensor(answer["tokens"])]
    return {
        "tokens": answer["tokens"],
        "logprobs": of_tokens.tolist(),
        "choice": logprobs_of.argmax(-1).tolist(),
    }


@functools.cache
def _rounded(model: Path, dtype: str) -> Any:
    """Hugging Face's model, computing in dtype."""
    import torch

    return by_type.causal(model, getattr(torch, dtype))


@functools.cache
def _logprobs(model: Any) -> Any:
    import torch

    @functools.cache
    def logprobs(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Any:
        with torch.no_grad():
            return (
                model(torch.tensor([prompt + tokens]))
                .logits[0, len(prompt) - 1 : -1]
                .float()
                .log_softmax(-1)
            )

    return logprobs


def run(
    cases: list[dict[str, Any]],
    plugins: str,
    timeout: float,
    directory: Path,
    progress: Progress,
) -> subprocess.CompletedProcess[str]:
    (directory / "cases.json").write_text(json.dumps(cases))  # too long for an argument
    command = [sys.executable, str(PROGRAM), str(directory / "cases.json")]
    variables = {"VLLM_PLUGINS": plugins, "OMP_NUM_THREADS": "1"}
    ranks, memory = max(case["ranks"] for case in cases), "3GiB"
    return npus.run(ranks, *command, memory=memory, timeout=timeout, progress=progress, **variables)


def main() -> None:
    """See tools/check hybrid."""
    parser = argparse.ArgumentParser(prog="tools/check hybrid", description=__doc__)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"default: all, {'; '.join(WAYS)}")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        action="append",
        help="of the model; default: all of the way",
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one engine")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="write the table of docs/attention.md#layers-with-states",
    )
    options = parser.parse_args()
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"no way {', '.join(sorted(unknown))}; there are {'; '.join(WAYS)}")
    asked = [
        (name, dtype)
        for name in options.ways or WAYS
        for dtype in options.dtype or WAYS[name].dtypes
    ]
    with tempfile.TemporaryDirectory() as temporary, progress("ways:", len(asked)) as steps:
        failed = sum(
            _check(part, plugins, Path(temporary), options, steps)
            for plugins, part in _by_plugins(asked).items()
        )
    sys.exit(1 if failed else 0)


def _by_plugins(asked: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Ways that one process can start, which imports vLLM once."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, dtype in asked:
        groups.setdefault(WAYS[name].plugins, []).append((name, dtype))
    return groups


def _check(
    ways: list[tuple[str, str]],
    plugins: str,
    directory: Path,
    options: argparse.Namespace,
    progress: Progress,
) -> int:
    """Serve a model in these ways and compare the answers; returns how many failed."""
    cases = {f"{name}, {dtype}": case(name, directory, dtype) for name, dtype in ways}
    done = run(
        [each | {"name": key} for key, each in cases.items()],
        plugins,
        options.timeout * len(cases),
        directory,
        progress,
    )
    results = {result["name"]: result for result in npus.results(done.stdout)}
    if missing := cases.keys() - results.keys():
        print(
            f"failed: {'; '.join(sorted(missing))}\n{done.stdout[-3000:]}{done.stderr[-6000:]}",
            flush=True,
        )
    for name, dtype in ways:
        key = f"{name}, {dtype}"
        if key not in results:
            continue
        ranks = results[key]["ranks"]
        record = compare(Path(cases[key]["model"]), dtype, ranks)
        record |= {
            key: ranks[0][key] for key in ("counters", "rule", "states", "graphs", "block_size")
        }
        print(key, json.dumps(record), f"{results[key]['seconds']:.0f} s", flush=True)
        if options.keep:
            kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
            kept[name] = kept.get(name, {}) | {dtype: record}
            KEPT.write_text(
                json.dumps({way: kept[way] for way in WAYS if way in kept}, indent=1) + "\n"
            )
    return len(missing)
