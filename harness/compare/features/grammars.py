# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Structured output and tool calls, checked without the engine's grammar library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from harness.compare.features.serving import greedy, prompts
from harness.references.log_probabilities import logits

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
