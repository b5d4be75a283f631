# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Logits processors and random numbers of the V2 runner, compared with a loop for each kernel of
vLLM's."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ascend_platform.runners.v2.kernels import logits_processors, thinking_budget
from ascend_platform.runners.v2.kernels.device_step import DeviceStep
from ascend_platform.runners.v2.kernels.step import running
from ascend_platform.sampling import noise
from harness.references.v2_batches import device

VOCABULARY, ROWS, WIDTH = 70, 6, 64
SEEDS = range(8)


class Batch:
    """Requests in a random order, each with a row for each of its up to three draft tokens and one
    more."""

    def __init__(self, seed: int, drafts: bool = True) -> None:
        rng = self.rng = random.Random(seed)
        self.requests = rng.sample(range(ROWS), 4)
        self.counts = [rng.randint(1, 4) if drafts else 1 for _ in self.requests]
        self.rows = [
            request
            for request, count in zip(self.requests, self.counts, strict=True)
            for _ in range(count)
        ]
        self.local = [place for count in self.counts for place in range(count)]
        self.prompt = [rng.randint(1, 20) for _ in range(ROWS)]
        self.total = [length + rng.randint(0, 20) for length in self.prompt]
        # few, so that words are found
        self.tokens = [[rng.randrange(6) for _ in range(WIDTH)] for _ in range(ROWS)]
        self.input_ids = [rng.randrange(6) for _ in self.rows]
        self.logits = [[rng.uniform(-4, 4) for _ in range(VOCABULARY)] for _ in self.rows]

    def output(self, row: int) -> list[int]:
        """The request's output, with the draft tokens before the row's."""
        request, place = self.rows[row], self.local[row]
        drafted = self.input_ids[row - place + 1 : row + 1]
        return self.tokens[request][self.prompt[request] : self.total[request]] + drafted

    def on_device(self) -> torch.Tensor:
        return device(self.logits, torch.float32)

    def mapping(self) -> torch.Tensor:
        return device(self.rows, torch.int64)


def expect(result: torch.Tensor, wanted: list[list[float]]) -> None:
    torch.testing.assert_close(result.cpu(), torch.tensor(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_penalties(seed: int) -> None:
    batch = Batch(seed)
    for row, place in enumerate(batch.local):
        if place and batch.rng.random() < 0.3:  # a placeholder
            batch.input_ids[row] = -1
    words = -(-VOCABULARY // 32)
    mask = torch.full((ROWS, words), 7, dtype=torch.int32, device="npu")
    counts = torch.full((ROWS, VOCABULARY), 7, dtype=torch.int32, device="npu")
    for tokens in batch.tokens:  # The sign of a word, and the last bit.
        tokens[0], tokens[WIDTH - 1] = 31, VOCABULARY - 1
    arguments = device(batch.tokens), device(batch.prompt), device(batch.total), mask, counts
    logits_processors.bincount(
        device(batch.requests, torch.int64), *arguments, max(batch.total[r] for r in batch.requests)
    )
    kept = [row for row in range(ROWS) if row not in batch.requests]
    # of other requests
    assert all((counts[row] == 7).all() and (mask[row] == 7).all() for row in kept)
    repetition, frequency, presence = (
        [batch.rng.choice([1.0, 1.5, 0.7]) for _ in range(ROWS)] for _ in range(3)
    )
    logits = batch.on_device()
    given = [device(each, torch.float32) for each in (repetition, frequency, presence)]
    logits_processors.apply_penalties(
        logits, batch.mapping(), device(batch.input_ids), device(batch.local), *given, mask, counts
    )
    for row, request in enumerate(batch.rows):
        output, prompt = batch.output(row), batch.tokens[request][: batch.prompt[request]]
        for token in range(VOCABULARY):
            value, times = batch.logits[row][token], output.count(token)
            if times or token in prompt:
                value = value / repetition[request] if value > 0 else value * repetition[request]
            batch.logits[row][token] = (
                value - frequency[request] * times - presence[request] * (times > 0)
            )
    expect(logits, batch.logits)


@pytest.mark.parametrize("restores", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_logit_bias(seed: int, restores: bool) -> None:
    batch, rng = Batch(seed), random.Random(seed)
    allowed, stops = (
        [rng.sample(range(VOCABULARY), rng.choice([0, 3, 5])) for _ in range(ROWS)]
        for _ in range(2)
    )
    stops[batch.requests[0]] = allowed[batch.requests[0]] = [3, 4]  # only stop tokens are left
    biases = [
        {token: rng.uniform(-2, 2) for token in rng.sample(range(VOCABULARY), rng.choice([0, 4]))}
        for _ in range(ROWS)
    ]
    least = [rng.randint(0, 40) for _ in range(ROWS)]
    least[batch.requests[0]] = 99
    restore = [int(restores and rng.random() < 0.8) for _ in range(ROWS)]
    positions = [rng.randint(0, 40) for _ in batch.rows]
    pad = lambda lists, filler: [[*each, *[filler] * (8 - len(each))] for each in lists]  # noqa: E731
    logits = batch.on_device()
    logits_processors.apply_logit_bias(
        logits, batch.mapping(), device(positions, torch.int64),
        device([len(each) for each in allowed]), device(pad(allowed, 11)),
        device([len(each) for each in biases]), device(pad(map(list, biases), 12)),
        device(pad([list(each.values()) for each in biases], 9.0), torch.float32),
        device(least), device([len(each) for each in stops]), device(restore), device(pad(stops, 13)), any(restore),
    )  # fmt: skip
    for row, request in enumerate(batch.rows):
        values = batch.logits[row]
        for token in range(VOCABULARY):
            values[token] = (
                -math.inf if allowed[request] and token not in allowed[request] else values[token]
            )
            values[token] += biases[request].get(token, 0)
        if positions[row] + 1 < least[request]:
            left = [
                -math.inf if token in stops[request] else value
                for token, value in enumerate(values)
            ]
            if max(left) > -math.inf or not restore[request]:
                values[:] = left
    expect(logits, batch.logits)


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_bad_words(seed: int, drafts: bool) -> None:
    batch = Batch(seed, drafts)
    rng = batch.rng
    words = [
        [[rng.randrange(6) for _ in range(rng.randint(1, 3))] for _ in range(rng.choice([0, 4, 6]))]
        for _ in range(ROWS)
    ]
    # with what earlier requests have left
    flat, offsets = [[99] * 30 for _ in range(ROWS)], [[5] * 9 for _ in range(ROWS)]
    for request, row_words in enumerate(words):
        tokens = [token for word in row_words for token in word]
        flat[request][: len(tokens)] = tokens
        offsets[request][: len(row_words) + 1] = [
            sum(map(len, row_words[:number])) for number in range(len(row_words) + 1)
        ]
    logits, longest = (
        batch.on_device(),
        max(1, *(len(words[request]) for request in batch.requests)),
    )
    logits_processors.apply_bad_words(
        logits, batch.mapping(), device(flat), device(offsets), device([len(row) for row in words]), device(batch.tokens),
        device(batch.prompt), device(batch.total), device(batch.input_ids), device(batch.local), longest,
    )  # fmt: skip
    banned = 0
    for row, request in enumerate(batch.rows):
        output = batch.output(row)
        for *before, last in words[request]:
            if output[len(output) - len(before) :] == before and len(before) <= len(output):
                batch.logits[row][last] = -math.inf
                banned += bool(before)
    expect(logits, batch.logits)
    assert banned or seed


def last(tokens: list[int], marker: list[int]) -> int:
    starts = range(len(tokens) - len(marker) + 1)
    return max((at for at in starts if tokens[at : at + len(marker)] == marker), default=-1)


@pytest.mark.parametrize("drafts", [True, False])
def test_thinking_budgets(drafts: bool) -> None:
    seen = dict.fromkeys(("forced", "continued", "within", "ended", "never", "none"), 0)
    for seed in range(24):
        batch = Batch(seed, drafts)
        rng = batch.rng
        start, natural = ([rng.randrange(6) for _ in range(rng.randint(1, 2))] for _ in range(2))
        forced = [rng.randrange(6) for _ in range(rng.randint(0, 2))] + natural
        budgets = [rng.choice([-1, 0, 3, 9]) for _ in range(ROWS)]
        logits, unused = batch.on_device(), device([0] * ROWS)
        counts = np.array(batch.counts)
        with running(DeviceStep(counts, False, num_draft_tokens=counts - 1 if drafts else None)):
            thinking_budget.apply_thinking_budget(
                logits, device(batch.requests), batch.mapping(), device(budgets), device(batch.tokens), device(batch.total),
                device(batch.input_ids), device(batch.local), *[unused] * 3, device(start), device(natural), device(forced),
            )  # fmt: skip
        for row, request in enumerate(batch.rows):
            tokens = batch.tokens[request][: batch.prompt[request]] + batch.output(row)
            begin, budget = last(tokens, start), budgets[request]
            ended = begin <= last(tokens, natural)
            thought = len(tokens) - begin - len(start)
            if budget < 0 or begin < 0 or ended or thought < budget:
                seen["none" if budget < 0 else "never" if begin < 0 else "ended" if ended else "within"] += 1  # fmt: skip
                continue
            num_forced = max(
                count
                for count in range(min(len(forced), len(tokens) + 1))
                if tokens[len(tokens) - count :] == forced[:count]
            )
            batch.logits[row][forced[num_forced]] = 1e9
            seen["continued" if num_forced else "forced"] += 1
        expect(logits, batch.logits)
    assert all(seen.values()), seen


@pytest.mark.parametrize("seed", SEEDS)
def test_grammars(seed: int) -> None:
    batch, stride = Batch(seed), 4
    starts = [sum(batch.counts[:number]) for number in range(len(batch.counts) + 1)]
    with_grammar = batch.rng.sample(range(4), 3)
    places = [number * stride + place for number in with_grammar for place in range(stride)]
    masks = [
        [batch.rng.getrandbits(32) - (1 << 31) for _ in range(-(-VOCABULARY // 32))] for _ in places
    ]
    logits = batch.on_device()
    step = SimpleNamespace(req_ids=list("abcd"), cu_num_logits_np=np.array(starts, np.int32))
    asked = ["abcd"[number] for number in with_grammar]
    worker = SimpleNamespace(mask_stride=stride)
    logits_processors.apply_grammar_bitmask(worker, logits, step, asked, np.array(masks, np.int32))
    for place, mask in zip(places, masks, strict=True):
        if place % stride < batch.counts[place // stride]:
            values = batch.logits[starts[place // stride] + place % stride]
            for token in range(VOCABULARY):
                values[token] = values[token] if mask[token // 32] >> token % 32 & 1 else -math.inf
    expect(logits, batch.logits)


def murmur3(*words: int) -> int:
    h, low = 0, (1 << 32) - 1

    def rotate(value: int, bits: int) -> int:
        return (value << bits | value >> 32 - bits) & low

    for word in words:
        key = rotate((word & low) * 0xCC9E2D51 & low, 15) * 0x1B873593 & low
        h = (rotate(h ^ key, 13) * 5 + 0xE6546B64) & low
    h ^= 4 * len(words)
    h = (h ^ h >> 16) * 0x85EBCA6B & low
    h = (h ^ h >> 13) * 0xC2B2AE35 & low
    return h ^ h >> 16


def test_noise_is_the_hash_of_seed_position_and_token() -> None:
    seeds, positions = [11, -(1 << 62) - 12345, (1 << 63) - 1], [0, 129, 1 << 30]
    actual = noise.exponential(device(seeds, torch.int64), device(positions, torch.int64), 50)
    wanted = [
        [
            -math.log1p(-(murmur3(seed, seed >> 32, position, token) + 0.5) * 2**-32)
            for token in range(50)
        ]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    torch.testing.assert_close(
        actual.cpu().double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-9
    )
    on_host = noise.hash_seeds(torch.tensor(seeds))
    assert on_host.tolist() == noise.hash_seeds(device(seeds, torch.int64)).tolist()
