# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Requests with seeds, and their tokens computed from transformers' logits, the seed and the
positions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from harness.compare.features import sampling
from harness.references.log_probabilities import logits

TOKENS = 24
LENGTHS = [1, 150, 33, 64, 7, 200]
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 2.0, "seed": 42},
    "top-k, top-p": {"temperature": 1.8, "top_k": 20, "top_p": 0.9, "seed": -7},
    "penalties": {
        "temperature": 2.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "seed": (1 << 62) + 5,
    },
}
MATES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0},
    {"temperature": 1.0, "seed": 42},
    {"temperature": 1.5, "top_k": 5, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "top_p": 0.5, "n": 3},
    {"temperature": 1.0, "bad_words": ["a"]},
]
"""Sampling parameters of other requests."""


def requests(
    samplers: dict[str, dict[str, Any]] = SAMPLERS, tokens: int = TOKENS
) -> list[dict[str, Any]]:
    """Two prompts for each sampler."""
    draw = random.Random(5)
    prompts = [[draw.randrange(2, 97) for _ in range(length)] for length in LENGTHS]
    return [
        {
            "prompt": prompts[(2 * number + second) % len(prompts)],
            "sampling": options | {"max_tokens": tokens, "ignore_eos": True},
        }
        for number, options in enumerate(samplers.values())
        for second in range(2)
    ]


def mates(tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Requests whose tokens are not compared."""
    draw = random.Random(6)
    return [
        {
            "prompt": [draw.randrange(2, 97) for _ in range(40 + 30 * number)],
            "sampling": options | {"max_tokens": tokens, "ignore_eos": True},
        }
        for number, options in enumerate(MATES)
    ]


def noise(seed: int, position: int, vocabulary: int) -> Any:
    """Exponential numbers, float64 ``[vocabulary]``, by the murmur3 hash of vLLM's V2 model
    runner."""
    low = np.uint64((1 << 32) - 1)

    def rotate(value: Any, bits: int) -> Any:
        return (value << np.uint64(bits) | value >> np.uint64(32 - bits)) & low

    h = np.zeros(vocabulary, np.uint64)
    for word in (seed % (1 << 32), (seed >> 32) % (1 << 32), position, np.arange(vocabulary)):
        key = np.broadcast_to(np.asarray(word, np.uint64), h.shape)
        key = rotate(key * np.uint64(0xCC9E2D51) & low, 15) * np.uint64(0x1B873593) & low
        h = (rotate(h ^ key, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & low
    h ^= np.uint64(16)
    h = (h ^ h >> np.uint64(16)) * np.uint64(0x85EBCA6B) & low
    h = (h ^ h >> np.uint64(13)) * np.uint64(0xC2B2AE35) & low
    h ^= h >> np.uint64(16)
    return -np.log1p(-(h.astype(np.float64) + 0.5) * 2.0**-32)


def expected(model: Any, request: dict[str, Any], answer: list[int]) -> Iterator[int]:
    """The token after the prompt and each part of the answer."""
    import torch

    prompt, options = request["prompt"], request["sampling"]
    scores = logits(model, prompt, [answer])
    tokens = torch.tensor([answer])
    for place in range(len(answer)):
        if options["temperature"] == 0:
            yield int(scores[0, place].argmax())
            continue
        shares = sampling.distribution(scores[:, place], prompt, tokens[:, :place], options)[0]
        drawn = noise(options["seed"], len(prompt) - 1 + place, len(shares))
        yield int((shares.log() - torch.from_numpy(drawn).log()).nan_to_num(nan=-math.inf).argmax())


def count_mismatches(
    model: Any, asked: list[dict[str, Any]], answers: list[Any]
) -> tuple[int, int]:
    """Number of tokens, and of those that are not the ones of their seeds and positions."""
    count = wrong = 0
    for request, (answer,) in zip(asked, answers, strict=True):
        tokens = answer["tokens"]
        count += len(tokens)
        wrong += sum(a != b for a, b in zip(tokens, expected(model, request, tokens), strict=True))
    return count, wrong
