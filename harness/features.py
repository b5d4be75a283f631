# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""LoRA, speculative decoding, sampling and structured output on emulated NPUs, compared with
references.

References: transformers and PEFT in float32 on the CPU, under the engine's own tokens; the
distribution that a token is sampled from, computed from their logits in float64.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import checkout, npus, perturbed_references
from harness.models import small as small_models
from harness.references import distance, logits, reference

PROGRAM = checkout.PROGRAMS / "serve_features.py"
FALSE_ALARM = 1e-6
"""How likely a statistical check would fail with another seed where all is right."""


def prompts(count: int = 6) -> list[list[int]]:
    draw = random.Random(0)
    lengths = [1, 150, 7, 33, 64, 5]
    return [[draw.randrange(2, 97) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def greedy(prompt: list[int], tokens: int = 24, **more: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "sampling": {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0},
    } | more


def case(
    name: str, model: Path, ranks: int, steps: list[Any], dtype: str = "float32", **engine: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "ranks": ranks,
        "model": str(model),
        "engine": {"dtype": dtype} | engine,
        "steps": steps,
    }


def serve(cases: list[dict[str, Any]], timeout: float = 1500, **variables: str) -> dict[str, Any]:
    """Results of harness/programs/serve_features.py by case name."""
    ranks = max(each["ranks"] for each in cases)
    quiet = {
        "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    } | variables
    done = npus.run(
        ranks, sys.executable, str(PROGRAM), json.dumps(cases), timeout=timeout, **quiet
    )
    found = npus.by_name(done)
    assert all(each["alike"] for each in found.values()), "ranks have other answers"
    return found


# Speculation


def methods(directory: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """By name: the model, and vLLM's speculative_config."""
    families = "Llama", "Glm4Moe", "DeepseekV3", "Glm4MoeLite", "GlmMoeDsa"
    llama, glm, deepseek, flash, sparse = (
        small_models.target(directory, family) for family in families
    )
    other = small_models.target(directory, seed=9)
    three = {"num_speculative_tokens": 3}
    return {
        "draft model, the same": (llama, {"method": "draft_model", "model": str(llama)} | three),
        "draft model, another": (llama, {"method": "draft_model", "model": str(other)} | three),
        "n-gram": (
            llama,
            {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3} | three,
        ),
        "n-gram on the NPU": (
            llama,
            {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 3} | three,
        ),
        "suffix": (llama, {"method": "suffix"} | three),
        "EAGLE": (llama, {"method": "eagle", "model": str(small_models.eagle(directory))} | three),
        "EAGLE, wrong": (
            llama,
            {"method": "eagle", "model": str(small_models.eagle(directory, wrong=True))} | three,
        ),
        "EAGLE-3": (
            llama,
            {"method": "eagle3", "model": str(small_models.eagle3(directory))} | three,
        ),
        "Medusa": (
            llama,
            {"method": "medusa", "model": str(small_models.medusa(directory))} | three,
        ),
        "MTP": (glm, {"method": "mtp", "num_speculative_tokens": 2}),
        "MTP, latent attention": (deepseek, {"method": "mtp", "num_speculative_tokens": 3}),
        "MTP, latent attention of GLM-4.7-Flash": (
            flash,
            {"method": "mtp", "num_speculative_tokens": 3},
        ),
        "MTP, sparse latent attention": (sparse, {"method": "mtp", "num_speculative_tokens": 3}),
    }


def speculation(
    directory: Path, names: list[str], ranks: int, dtype: str = "float32", **engine: Any
) -> list[dict[str, Any]]:
    known = methods(directory)
    return [
        case(
            name,
            known[name][0],
            ranks,
            [["generate", [greedy(prompt) for prompt in prompts()]]],
            dtype,
            speculative_config=known[name][1],
            **engine,
        )
        for name in names
    ]


def accepted(found: dict[str, Any]) -> tuple[int, int, int]:
    """Number of drafts, of draft tokens, and of accepted tokens."""
    counts = found["counts"]
    return tuple(
        int(counts.get(name) or 0) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )  # type: ignore[return-value]


def compare(model: Any, asked: list[dict[str, Any]], answers: list[Any]) -> tuple[int, int, float]:
    """Number of tokens, of those that differ from the reference's argmax, and the largest
    log-probability difference."""
    pairs = [
        distance(model, request["prompt"], answer[0])
        for request, answer in zip(asked, answers, strict=True)
    ]
    return (
        sum(len(answer[0]["tokens"]) for answer in answers),
        sum(one for one, _ in pairs),
        max(far for _, far in pairs),
    )


# Adapters


def adapters(directory: Path) -> dict[str, list[Any]]:
    """Arguments of LoRARequest by adapter name."""
    model = small_models.target(directory)
    named = enumerate(small_models.ADAPTERS, 1)
    return {
        name: [name, number, str(small_models.adapter(model, directory, name))]
        for number, name in named
    }


def lora_requests(directory: Path, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Each prompt with every adapter and with none, in one batch."""
    known = adapters(directory)
    asked = [greedy(prompt, 8) for prompt in prompts(3)]
    return asked + [
        greedy(prompt, 8, lora=request)
        for name, request in known.items()
        if name not in without
        for prompt in prompts(3)
    ]


def lora_steps(directory: Path, slots: int) -> list[Any]:
    known = adapters(directory)
    if slots < len(known):  # vLLM's scheduler does not count a slot that an adapter is pinned to
        return [["generate", lora_requests(directory)]]
    return [
        ["list"],
        *(["add", *known[name]] for name in ("all", "attention", "wide")),
        ["list"],
        ["pin", known["attention"][1]],
        ["remove", known["all"][1]],
        ["list"],
        ["pin", 99],
        ["generate", lora_requests(directory)],
    ]


LORA_STATES = [[], True, True, True, [1, 2, 3], True, True, [2, 3]]
"""What the steps before the last two give: listed, added three times, listed, pinned, removed,
listed."""


def lora(
    name: str, directory: Path, ranks: int, dtype: str = "float32", slots: int = 4, **engine: Any
) -> dict[str, Any]:
    options = {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": 4,
        "max_lora_rank": 16,
    } | engine
    return case(
        name, small_models.target(directory), ranks, lora_steps(directory, slots), dtype, **options
    )


def compare_lora(
    directory: Path, found: dict[str, Any], dtype: str = "float32"
) -> tuple[int, int, float]:
    """As :func:`compare`, each answer against PEFT with its adapter."""
    asked = [
        (request, Path(request["lora"][2]) if "lora" in request else None)
        for request in lora_requests(directory)
    ]
    return _compare_adapted(small_models.target(directory), asked, found["steps"][-1], dtype)


def _compare_adapted(
    model: Path, asked: list[tuple[Any, Path | None]], answers: list[Any], dtype: str
) -> tuple[int, int, float]:
    pairs = zip(asked, answers, strict=True)
    found = [
        compare(reference(model, own, dtype), [request], [answer])
        for (request, own), answer in pairs
    ]
    return (
        sum(tokens for tokens, _, _ in found),
        sum(others for _, others, _ in found),
        max(far for _, _, far in found),
    )


def scored_prompts(directory: Path) -> list[dict[str, Any]]:
    """Prompts whose log-probabilities are requested, in one batch, with an adapter on `lm_head` and
    with none."""
    adapter = {"lora": adapters(directory)["wide"]}
    asked = [greedy(prompt, 2, **more) for prompt in prompts()[1:] for more in ({}, adapter)]
    return [
        request | {"sampling": request["sampling"] | {"prompt_logprobs": 0}} for request in asked
    ]


def compare_scored_prompts(directory: Path, answers: list[Any]) -> tuple[int, float]:
    """Number of the prompts' tokens, and the largest difference of a log-probability
    from PEFT's."""
    import torch

    tokens, far = 0, 0.0
    for request, (answer,) in zip(scored_prompts(directory), answers, strict=True):
        model = reference(
            small_models.target(directory), Path(request["lora"][2]) if "lora" in request else None
        )
        exact = logits(model, request["prompt"][:1], [request["prompt"][1:]])[0].log_softmax(-1)
        exact = exact.gather(1, torch.tensor(request["prompt"][1:])[:, None])[:, 0]
        tokens, far = (
            tokens + len(exact),
            max(far, float((exact - torch.tensor(answer["prompt_logprobs"])).abs().max())),
        )
    return tokens, far


def lora_on_family(
    name: str, directory: Path, family: str, ranks: int, dtype: str = "float32"
) -> dict[str, Any]:
    """As :func:`lora`, with adapters on the experts of Qwen2Moe, or on the latent attention of
    DeepseekV3."""
    steps: list[Any] = [
        ["generate", [request for request, _ in family_requests(directory, family)]]
    ]
    if family == "DeepseekV3":
        model = small_models.target(directory, family)
        steps += [
            ["add", each, 9, str(small_models.adapter(model, directory, each))]
            for each in small_models.ABSORBED_ADAPTER
        ]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": max(small_models.EXPERT_RANKS)}
    return case(name, small_models.target(directory, family), ranks, steps, dtype, **options)


def family_requests(directory: Path, family: str) -> list[tuple[dict[str, Any], Path | None]]:
    """Each prompt with every adapter of a family and with none, and PEFT's form of the adapter."""
    model = small_models.target(directory, family)
    if family == "Qwen2Moe":
        made = [
            small_models.adapter_on_experts(model, directory, rank)
            for rank in small_models.EXPERT_RANKS
        ]
    else:
        made = [
            (path, path)
            for path in (
                small_models.adapter(model, directory, name)
                for name in small_models.LATENT_ADAPTERS
            )
        ]
    asked: list[tuple[dict[str, Any], Path | None]] = [
        (greedy(prompt, 8), None) for prompt in prompts(3)
    ]
    for number, (own, path) in enumerate(made, 1):
        asked += [
            (greedy(prompt, 8, lora=[path.name, number, str(path)]), own) for prompt in prompts(3)
        ]
    return asked


def compare_lora_on_family(
    directory: Path, family: str, answers: list[Any], dtype: str = "float32"
) -> tuple[int, int, float]:
    """As :func:`compare_lora`."""
    return _compare_adapted(
        small_models.target(directory, family), family_requests(directory, family), answers, dtype
    )


# Sampling

SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top-k 5": {"temperature": 0.4, "top_k": 5},
    "top-p 0.7": {"temperature": 0.7, "top_p": 0.7},
    "top-k 20, top-p 0.9, min-p 0.1, a seed": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,
    },
    "penalties": {
        "temperature": 0.5,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.4,
    },
    "logit bias, bad words, top-k 60": {
        "temperature": 0.6,
        "logit_bias": {"40": 2.0, "50": -3.0},
        "bad_words": ["a"],
        "top_k": 60,
    },
}


DRAFTS_EXCLUDE = ("min_p", "logit_bias")
"""vLLM refuses these in a request where it speculates."""


def sampled(count: int, tokens: int = 2, drafts: bool = False) -> list[dict[str, Any]]:
    """`count` answers for each kind of sampling, all in one batch."""
    common = {"n": count, "max_tokens": tokens, "ignore_eos": True}
    return [
        {
            "prompt": prompts()[2],
            "sampling": (
                common
                | {key: options[key] for key in options if not (drafts and key in DRAFTS_EXCLUDE)}
            ),
        }
        for options in SAMPLING.values()
    ]


def distribution(scores: Any, prompt: list[int], before: Any, options: dict[str, Any]) -> Any:
    """The distribution that vLLM's documentation of SamplingParams defines, float64 ``[answers,
    vocabulary]``.

    scores: the model's logits ``[answers, vocabulary]``; before: the tokens that each answer has
    already, ``[answers, places]``.
    """
    import torch

    scores = scores.double().clone()
    for word in options.get("bad_words", []):
        scores[:, small_models.CHARACTERS.index(word)] = -math.inf
    for token, bias in options.get("logit_bias", {}).items():
        scores[:, int(token)] += bias
    times = torch.zeros_like(scores).scatter_add_(
        1, before, torch.ones_like(before, dtype=scores.dtype)
    )
    seen = times > 0
    factor = torch.where(
        seen.index_fill(1, torch.tensor(prompt), True), options.get("repetition_penalty", 1.0), 1.0
    )
    scores = torch.where(scores > 0, scores / factor, scores * factor)
    scores -= (
        options.get("frequency_penalty", 0.0) * times + options.get("presence_penalty", 0.0) * seen
    )
    shares = (scores / options["temperature"]).softmax(-1)
    shares = shares * (shares >= options.get("min_p", 0.0) * shares.amax(1, keepdim=True))
    ranked, order = shares.sort(descending=True)
    ranked[:, options.get("top_k", ranked.shape[1]) :] = 0
    ranked = ranked / ranked.sum(1, keepdim=True)
    ranked = ranked * ((ranked.cumsum(-1) - ranked) < options.get("top_p", 2.0))
    return torch.empty_like(ranked).scatter_(1, order, ranked / ranked.sum(1, keepdim=True))


def tail(statistic: float, freedom: int) -> float:
    """Survival function of the chi-square distribution."""
    import torch

    return float(
        torch.special.gammaincc(
            torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()
        )
    )


def chi_square(counts: list[float], expected: list[float]) -> float:
    """p-value of a chi-square test; bins with fewer than five expected counts are merged."""
    pairs = sorted(zip(expected, counts, strict=True), reverse=True)
    bins, rest = [pair for pair in pairs if pair[0] >= 5], [pair for pair in pairs if pair[0] < 5]
    if sum(e for e, _ in rest) >= 5:
        bins.append((sum(e for e, _ in rest), sum(c for _, c in rest)))
    return tail(sum((c - e) ** 2 / e for e, c in bins), max(1, len(bins) - 1))


def check_sampling(
    model: Any, requests: list[dict[str, Any]], served: list[Any], kinds: Iterable[str] = SAMPLING
) -> dict[str, tuple[int, int, float, float]]:
    """By kind: tokens, tokens of probability zero, and p-values of chi-square tests of the first
    token and of all.

    For the latter each token becomes the place that a draw for it has in its own distribution, the
    likelier tokens first; where all is right these places are spread evenly, whatever tokens went
    before.
    """
    import torch

    result = {}
    for name, request, answers in zip(kinds, requests, served, strict=True):
        prompt, options = request["prompt"], request["sampling"]
        tokens = torch.tensor([answer["tokens"] for answer in answers])
        scores, draw = logits(model, prompt, tokens.tolist()), torch.Generator().manual_seed(1)
        impossible, places = 0, []
        for place in range(tokens.shape[1]):
            shares = distribution(scores[:, place], prompt, tokens[:, :place], options)
            share = shares.gather(1, tokens[:, place : place + 1])
            impossible += int((share == 0).sum())
            likelier = (shares * (shares > share)).sum(1)
            places.append(
                likelier
                + torch.rand(len(tokens), generator=draw, dtype=torch.float64) * share.squeeze(1)
            )
            if not place:
                counts = torch.bincount(tokens[:, 0], minlength=shares.shape[1])
                alone = chi_square(counts.tolist(), (shares[0] * len(tokens)).tolist())
        spread = torch.cat(places).histc(20, 0, 1)
        total = tokens.numel()
        result[name] = total, impossible, alone, chi_square(spread.tolist(), [total / 20] * 20)
    return result


# Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "cde", "f"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": "[a-f]{3}-[0-9]{2,4}!"},
    "choice": {"choice": ["yes", "no", "maybe"]},
}


TOOL_CALL = (
    '<tool_call>\\{"name": "(add|find)", "arguments": \\{"size": [0-9]{1,3}, "text": "[a-zA-Z'
    ' ,.;:!?]{12,24}"\\}\\}</tool_call>'
)
"""In Hermes' format, with text in which a drafter can be right."""


def tool_calls(count: int = 3) -> list[dict[str, Any]]:
    """Requests for two tool calls each, with one in between that has no grammar."""
    grammar = {"structured": {"regex": f"({TOOL_CALL}){{2}}"}}
    asked = [
        {"prompt": prompt, "sampling": {"temperature": 0, "max_tokens": 250}} | grammar
        for prompt in prompts(count)
    ]
    return [
        asked[0],
        {
            "prompt": prompts()[3],
            "sampling": {"temperature": 0, "max_tokens": 40, "ignore_eos": True},
        },
        *asked[1:],
    ]


def others_with_grammar(
    model: Any, directory: Path, request: dict[str, Any], tokens: list[int]
) -> int:
    """Tokens of an answer that are not the model's argmax among those that the request's grammar
    allows."""
    import torch
    import transformers
    import xgrammar

    scores = logits(model, request["prompt"], [tokens])[0]
    if "structured" in request:
        vocabulary = scores.shape[1]
        words = xgrammar.TokenizerInfo.from_huggingface(
            transformers.AutoTokenizer.from_pretrained(directory), vocab_size=vocabulary
        )
        matcher = xgrammar.GrammarMatcher(
            xgrammar.GrammarCompiler(words).compile_regex(request["structured"]["regex"])
        )
        allowed = xgrammar.allocate_token_bitmask(len(tokens), vocabulary)
        for place, token in enumerate(tokens):
            matcher.fill_next_token_bitmask(allowed, place)
            assert matcher.accept_token(token), f"token {token} at {place} is not allowed"
        xgrammar.apply_token_bitmask_inplace(scores, allowed)
    return int((scores.argmax(-1) != torch.tensor(tokens)).sum())


def structured(count: int = 4) -> list[dict[str, Any]]:
    """Requests with a grammar, each followed by one without."""
    sampling = {"temperature": 1.5, "max_tokens": 80}
    asked = []
    for number in range(count):
        for grammar in GRAMMARS.values():
            asked.append(
                {
                    "prompt": prompts()[number % 6],
                    "sampling": sampling | {"seed": number},
                    "structured": grammar,
                }
            )
            asked.append(greedy(prompts()[number % 6], 6))
    return asked


def matches(request: dict[str, Any], text: str) -> bool:
    """Whether an answer matches its grammar, checked without xgrammar."""
    grammar = request["structured"]
    if "regex" in grammar:
        return re.fullmatch(grammar["regex"], text) is not None
    if "choice" in grammar:
        return text in grammar["choice"]
    try:
        read = json.loads(text)
    except ValueError:
        return False
    return (
        sorted(read) == ["name", "size", "tags"]
        and read["name"] in ("ab", "cde", "f")
        and type(read["size"]) is int
        and 0 <= read["size"] <= 99
        and len(read["tags"]) <= 2
        and all(type(tag) is bool for tag in read["tags"])
    )


def count_matches(served: list[Any], count: int = 4) -> tuple[int, int]:
    """Number of answers with a grammar, and of those that match it."""
    pairs = [
        (request, answer[0]["text"])
        for request, answer in zip(structured(count), served, strict=True)
        if "structured" in request
    ]
    return len(pairs), sum(matches(request, text) for request, text in pairs)


def main() -> None:
    """See tools/check features."""
    parser = argparse.ArgumentParser(prog="tools/check features", description=__doc__)
    parser.add_argument(
        "what", nargs="*", metavar="PART", help=f"of {', '.join(TABLES)}; default: all"
    )
    parser.add_argument(
        "--ranks", type=int, action="append", help="NPUs, for tensor parallelism; default: 1 and 2"
    )
    parser.add_argument("--method", action="append", help="of speculation; default: all")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["bfloat16", "float16", "float32"],
        help="of speculation",
    )
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        help="of speculation: options of the engine, in JSON",
    )
    parser.add_argument("--answers", type=int, default=2000, help="for each kind of sampling")
    options = parser.parse_args()
    wrong = False
    with tempfile.TemporaryDirectory() as directory:
        for what in options.what or ["speculation", "lora", "sampling"]:
            for ranks in options.ranks or [1, 2]:
                rows = TABLES[what](Path(directory), ranks, options)
                for row, right in rows:
                    print(
                        f"| {ranks} | {' | '.join(map(str, row))} | {'yes' if right else 'NO'} |",
                        flush=True,
                    )
                    wrong |= not right
    sys.exit(wrong)


def _speculation_table(directory: Path, ranks: int, options: Any) -> list[tuple[list[Any], bool]]:
    names, rows = options.method or list(methods(directory)), []
    if not options.method and importlib.util.find_spec("arctic_inference") is None:
        names.remove("suffix")
        print(
            "suffix is left out: arctic-inference is not installed; docs/speculative-decoding.md"
            " says how",
            flush=True,
        )
    found, dtype = (
        serve(speculation(directory, names, ranks, options.dtype, **options.engine)),
        options.dtype,
    )
    for name in names:
        asked = [greedy(prompt) for prompt in prompts()]
        model = reference(methods(directory)[name][0], None, dtype)
        tokens, others, far = compare(model, asked, found[name]["steps"][0])
        drafts, drafted, taken = accepted(found[name])
        limit, unexplained = 1e-3, (others, far)
        if dtype != "float32":
            limit, unexplained = (
                0.03,
                perturbed_references.unexplained(model, asked, found[name]["steps"][0], dtype),
            )
        right = (
            not unexplained[0] and unexplained[1] < limit and (taken > 0) == ("wrong" not in name)
        )
        right &= taken == drafted or name != "draft model, the same"
        rows.append(([name, tokens, others, f"{far:.1e}", drafts, drafted, taken], right))
    return rows


def _lora_table(directory: Path, ranks: int, options: Any) -> list[tuple[list[Any], bool]]:
    kinds: dict[str, dict[str, Any]] = {
        "4 in a batch": {},
        "2 slots for 4": {"slots": 2},
        "bfloat16": {"dtype": "bfloat16"},
    }
    if ranks > 1:
        kinds["fully sharded"] = {"fully_sharded_loras": True}
    found, rows = serve([lora(name, directory, ranks, **kind) for name, kind in kinds.items()]), []
    for name, kind in kinds.items():
        dtype = kind.get("dtype", "float32")
        tokens, others, far = compare_lora(directory, found[name], dtype)
        right = (not others and far < 1e-3 if dtype == "float32" else far < 0.2) and found[name][
            "steps"
        ][:-2] in (
            LORA_STATES,
            [],
        )
        rows.append(([name, tokens, others, f"{far:.1e}"], right))
    return rows


def _latent_lora_table(directory: Path, ranks: int, options: Any) -> list[tuple[list[Any], bool]]:
    found = serve(
        [lora_on_family("latent attention", directory, "DeepseekV3", ranks, options.dtype)]
    )["latent attention"]
    tokens, others, far = compare_lora_on_family(
        directory, "DeepseekV3", found["steps"][0], options.dtype
    )
    right = far < (1e-3 if options.dtype == "float32" else 0.2) and "kv_b_proj, which" in str(
        found["steps"][1]
    )
    return [(["latent attention", tokens, others, f"{far:.1e}", found["steps"][1]], right)]


def _sampling_table(directory: Path, ranks: int, options: Any) -> list[tuple[list[Any], bool]]:
    model, rows = small_models.target(directory), []
    draft = {
        "method": "draft_model",
        "model": str(small_models.target(directory, seed=9, size=0.3)),
        "num_speculative_tokens": 2,
    }
    grammar: dict[str, Any] = {
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}
    }
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        "with a draft model: ": {"speculative_config": draft},
    }
    asked = {
        name: sampled(options.answers, 2 if not kind else 5, bool(kind))
        for name, kind in kinds.items()
    }
    steps = {
        name: [["generate", requests], ["generate", structured()]]
        for name, requests in asked.items()
    }
    found = serve(
        [case(name, model, ranks, steps[name], **grammar, **kind) for name, kind in kinds.items()],
        timeout=3000,
    )
    for prefix in kinds:
        answers, grammars = found[prefix]["steps"]
        for name, (tokens, impossible, first, spread) in check_sampling(
            reference(model), asked[prefix], answers
        ).items():
            cells = [prefix + name, tokens, impossible, f"{first:.3f}", f"{spread:.3f}"]
            rows.append((cells, not impossible and min(first, spread) > FALSE_ALARM))
        given, matching = count_matches(grammars)
        rows.append(([prefix + "grammars", given, given - matching, "", ""], given == matching))
    return rows


TABLES = {
    "speculation": _speculation_table,
    "lora": _lora_table,
    "latent": _latent_lora_table,
    "sampling": _sampling_table,
}
