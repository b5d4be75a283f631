# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Greedy requests whose tokens something besides the model decides: penalties, logits processors,
grammars, thinking budgets, prompts as embeddings. Each token is computed again from transformers'
logits."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.compare.features import sampling, serving
from harness.models import small as small_models
from harness.references import log_probabilities

BUDGETS = [None, None, 0, 1, 2, 5, 9, 40]
START, END = "<", "so>"
THINKING: dict[str, Any] = {
    "reasoning_config": {"reasoning_start_str": START, "reasoning_end_str": END}
}
EOS = 1
STOPS = list(range(2, 60))
CONSTRAINTS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.9, "presence_penalty": 0.6},
    {"bad_words": ["a", "q", "7"]},
    {"allowed_token_ids": list(range(3, 90, 2))},
    {"min_tokens": 8, "stop_token_ids": STOPS, "ignore_eos": False},
    {},
    {"logit_bias": {"0": 5.5}, "repetition_penalty": 3.0},
    {"logit_bias": {"40": 3.0, "90": -4.0}},
]
"""Token 0 stands for unknown tokens of prompts in vLLM's requests."""
REGEX = "[a-c]{6}x[0-9]{3}"


def ids(text: str) -> list[int]:
    return list(map(small_models.CHARACTERS.index, text))


def requests(
    model: Path, drafts: bool = False, tokens: int = 16, embedded: bool = True
) -> list[dict[str, Any]]:
    """Requests for each constraint and grammar, with prompts as token ids, as embeddings, and as
    both; vLLM refuses logit bias together with draft tokens."""
    kept = [each for each in CONSTRAINTS if not (drafts and "logit_bias" in each)]
    asked = []
    for number, options in enumerate([*kept, *kept, None, None]):
        prompt = serving.prompts()[number % 6]
        middle = {"first": len(prompt) // 4, "embedded": len(prompt) // 2}
        for given in ({}, {"embedded": len(prompt)}, middle) if embedded else ({},):
            request = serving.greedy(prompt, tokens, model=str(model), **given)
            if options is None:
                request["structured"] = {"regex": REGEX}
                request["sampling"]["ignore_eos"] = False
            else:
                request["sampling"] |= options
            asked.append(request)
    return asked


def choices(
    model: Any, request: dict[str, Any], answer: list[int], masks: Any = None
) -> Iterator[int]:
    """The token after the prompt and each part of an answer.

    Penalties count the answer, and the prompt's token ids that are known. ``masks`` bool ``[tokens,
    vocabulary]`` are the tokens that a grammar allows.
    """
    import torch

    prompt, options = request["prompt"], request["sampling"] | {"temperature": 1.0}
    first, count = request.get("first", 0), request.get("embedded", 0)
    known = prompt[:first] + prompt[first + count :]
    scores, tokens = log_probabilities.logits(model, prompt, [answer]), torch.tensor([answer])
    if "allowed_token_ids" in options:
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        allowed[options["allowed_token_ids"]] = True
        scores = scores.masked_fill(~allowed, -math.inf)
    if "min_tokens" in options:
        scores[:, : options["min_tokens"], [EOS, *options["stop_token_ids"]]] = -math.inf
    if masks is not None:
        scores = scores.masked_fill(~masks, -math.inf)
    for at in range(len(answer)):
        yield int(sampling.distribution(scores[:, at], known, tokens[:, :at], options).argmax())


def allowed_by_grammar(request: dict[str, Any], answer: list[int]) -> Any:
    """Which tokens the request's regular expression allows at each position, by Python's ``re`` of
    texts that it can still match; bool ``[tokens, vocabulary]``."""
    import torch

    assert request["structured"]["regex"] == REGEX
    classes = ["abc"] * 6 + ["x"] + ["0123456789"] * 3
    masks = torch.zeros(len(answer), small_models.VOCABULARY, dtype=torch.bool)
    for at in range(len(answer)):
        masks[at, ids(classes[at]) if at < len(classes) else [EOS]] = True
    return masks


def wrong(
    model: Any, asked: list[dict[str, Any]], answers: list[Any]
) -> tuple[int, int, list[str]]:
    """Numbers of tokens and of those that are not their choices, and a line for each answer with
    such tokens."""
    count, mismatches, lines = 0, 0, []
    for request, (answer,) in zip(asked, answers, strict=True):
        tokens = answer["tokens"]
        masks = allowed_by_grammar(request, tokens) if "structured" in request else None
        different = [
            at
            for at, choice in enumerate(choices(model, request, tokens, masks))
            if choice != tokens[at]
        ]
        count, mismatches = count + len(tokens), mismatches + len(different)
        if different:
            of_prompt = f"prompt of {len(request['prompt'])}, {request.get('embedded', 0)} embedded"
            named = request["sampling"].keys() | request.get("structured", {}).keys()
            names = ", ".join(sorted(named - serving.greedy([])["sampling"].keys()))
            lines.append(f"{names}, {of_prompt}: other tokens at {different}")
    return count, mismatches, lines


def with_budgets(seed: int, count: int = 24) -> list[dict[str, Any]]:
    """Requests that end at different times, in which thinking has not begun, has begun, has gone on,
    or has ended."""
    draw, asked = random.Random(seed), []
    for number in range(count):
        prompt = [draw.randrange(2, 97) for _ in range(draw.choice([1, 3, 20, 70]))]
        thought = [draw.randrange(2, 97) for _ in range(draw.randrange(6))]
        prompt += [
            [],
            ids(START),
            [*ids(START), *thought],
            [*ids(START), 9, 10, *ids(END), 12],
        ][number % 4]
        request = serving.greedy(prompt, draw.choice([5, 12, 30, 40]))
        request["sampling"]["thinking_token_budget"] = draw.choice(BUDGETS)
        asked.append(request)
    return asked


def _last(tokens: list[int], marker: list[int]) -> int:
    starts = range(len(tokens) - len(marker) + 1)
    return max((at for at in starts if tokens[at : at + len(marker)] == marker), default=-1)


def beyond_budgets(
    model: Any, asked: list[dict[str, Any]], answers: list[Any]
) -> tuple[int, int, int]:
    """Numbers of tokens, of those that are neither the model's nor forced by a budget, and of
    forced ones."""
    start, end, count, mismatches, forced = ids(START), ids(END), 0, 0, 0
    for request, (answer,) in zip(asked, answers, strict=True):
        budget, tokens = request["sampling"]["thinking_token_budget"], list(request["prompt"])
        best = log_probabilities.logits(model, tokens, [answer["tokens"]])[0].argmax(-1).tolist()
        for token, wanted in zip(answer["tokens"], best, strict=True):
            begin = _last(tokens, start)
            thought = len(tokens) - begin - len(start)
            choice = wanted
            if budget is not None and begin > _last(tokens, end) and thought >= budget:
                choice = end[
                    max(n for n in range(len(end)) if tokens[len(tokens) - n :] == end[:n])
                ]
                forced += choice != wanted
            count, mismatches = count + 1, mismatches + (token != choice)
            tokens.append(token)
    return count, mismatches, forced
