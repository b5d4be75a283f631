# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sampling, compared with the distribution that vLLM documents, computed in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from harness.compare.features.serving import prompts
from harness.models import small as small_models
from harness.references.log_probabilities import logits

FALSE_ALARM = 1e-6
"""How likely a statistical check would fail with another seed where all is right."""


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
    """`count` answers for each sampling method, all in one batch."""
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
        seen.index_fill(1, torch.tensor(prompt, dtype=torch.int64), True),
        options.get("repetition_penalty", 1.0),
        1.0,
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
    """Tokens, tokens of probability zero, and p-values of chi-square tests of the first token and
    of all tokens, by sampling method.

    For the latter each token becomes its quantile in its own distribution, likelier tokens first.
    Correct quantiles are uniformly distributed, whatever the earlier tokens are.
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
