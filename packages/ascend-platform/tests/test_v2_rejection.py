# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Verification of draft tokens in the V2 runner, compared with a loop for each of vLLM's kernels, and
with distributions."""

import random
from typing import Any

import pytest
import torch
from ascend_platform.overrides import table
from harness.references.v2_batches import ROWS, STEPS, VOCABULARY, Drafts, device
from packaging.version import Version
from vllm import __version__ as vllm_version

if Version(vllm_version).release < Version(table.V2_SINCE).release:
    pytest.skip("vLLM's V2 runner is another", allow_module_level=True)

from ascend_platform.runners.v2.kernels import rejection

NEAR_1 = 38816331


def verify(
    batch: Drafts,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    drafted: Any,
    heat: Any,
    seed: int = 0,
    **options: Any,
) -> Any:
    requests = [number for number, drafts in enumerate(batch.drafts) for _ in range(drafts + 1)]
    mapping = device(batch.rows, torch.int64)
    places = [place for drafts in batch.drafts for place in range(drafts + 1)]
    seeds = device([seed or row for row in range(ROWS)], torch.int64)
    return rejection.rejection_sample(
        target.npu(), None if draft is None else draft.npu(), device(drafted), device(batch.logits),
        device([9 + place for place in places], torch.int64), mapping, mapping[requests], device(places),
        device(heat, torch.float32), seeds, STEPS, **options,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_greedy_requests_accept_what_the_target_would_choose(seed: int) -> None:
    batch, rng = Drafts(seed, decode=True), random.Random(seed)
    best = [rng.randrange(VOCABULARY) for _ in range(batch.logits[-1])]
    target = torch.nn.functional.one_hot(torch.tensor(best), VOCABULARY).float()
    drafted = [0] * len(best)
    expected = []
    for number, drafts in enumerate(batch.drafts):
        first = batch.logits[number]
        for place in range(drafts):
            drafted[first + place + 1] = rng.choice(
                [best[first + place]] * 3 + [rng.randrange(VOCABULARY), -1]
            )
        right = next(
            (place for place in range(drafts) if drafted[first + place + 1] != best[first + place]),
            drafts,
        )
        expected.append(best[first : first + right + 1])
    tokens, counts = verify(batch, target, None, drafted, [0.0] * ROWS)
    assert counts.tolist() == [len(each) for each in expected]
    assert [
        row[: len(each)] for row, each in zip(tokens.tolist(), expected, strict=True)
    ] == expected

    flat = device([7] * len(best), torch.int64)
    rejection.flatten_sampled(flat, tokens, STEPS + 1, counts, device(batch.logits), num_warps=1)
    for number, each in enumerate(expected):
        of_request = flat[batch.logits[number] : batch.logits[number + 1]].tolist()
        assert of_request == each + [0] * (len(of_request) - len(each))


@pytest.mark.parametrize("width", [6, 4, 0])
def test_sampled_tokens_have_the_target_distribution(width: int) -> None:
    """Of many requests with the same draft distribution, also of a drafter with fewer tokens, or
    the same draft token."""
    count, steps, vocabulary = 6000, 1, 6
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(vocabulary, generator=generator)
    proposal = torch.randn(vocabulary, generator=generator)[:width]
    drafted = torch.full((count, 2), 2)
    if width:
        drafted[:, 1] = torch.multinomial(
            (proposal / 0.7).softmax(-1), count, replacement=True, generator=generator
        )
    mapping = torch.arange(count)
    tokens, counts = rejection.rejection_sample(
        target.expand(2 * count, -1).contiguous().npu(),
        proposal.expand(count, steps, -1).contiguous().npu() if width else None,
        drafted.view(-1).int().npu(),
        (torch.arange(count + 1) * 2).int().npu(),
        torch.arange(2).repeat(count).npu(),
        mapping.npu(),
        mapping.repeat_interleave(2).npu(),
        torch.arange(2).repeat(count).int().npu(),
        torch.full((count,), 0.7).npu(),
        torch.randint(1 << 62, (count,), generator=generator).npu(),
        steps,
    )
    expected = target.double().softmax(-1)
    accepted = (
        torch.minimum(expected[:width], (proposal / 0.7).double().softmax(-1)).sum()
        if width
        else expected[2]
    )
    assert abs((counts == 2).float().mean().item() - accepted) < 0.03
    # The first token, and the one after an accepted draft.
    for chosen in (tokens[:, 0], tokens[counts == 2, 1]):
        actual = torch.bincount(chosen.cpu(), minlength=vocabulary).double()
        statistic = ((actual - expected * len(chosen)) ** 2 / (expected * len(chosen))).sum().item()
        assert statistic < 37  # With 5 degrees of freedom, exceeded in one of 10^6 cases.


def test_synthetic_acceptance_has_its_rates() -> None:
    batch = Drafts(3, decode=True)
    target, drafted = torch.zeros(batch.logits[-1], VOCABULARY), [5] * batch.logits[-1]
    # The last seed's number at position 9 is so near to 1 that float32 rounds it.
    for rate, seed in ((0.0, 0), (1.0, 0), (1.0, NEAR_1)):
        rates = device([rate] * STEPS, torch.float32)
        tokens, counts = verify(
            batch, target, None, drafted, [0.0] * ROWS, seed, synthetic_conditional_rates=rates
        )
        assert counts.tolist() == [drafts * rate + 1 for drafts in batch.drafts]
    assert all(
        row[:drafts] == [5] * drafts
        for row, drafts in zip(tokens.tolist(), batch.drafts, strict=True)
    )


def test_other_verification_methods_are_not_mistaken() -> None:
    with pytest.raises(AssertionError, match="block verification"):
        verify(
            Drafts(0),
            torch.zeros(99, VOCABULARY),
            None,
            [0] * 99,
            [0.0] * ROWS,
            use_block_verification=True,
        )


def test_placeholders_after_a_prompt_are_rejected() -> None:
    tokens, places = rejection.gather_draft_sampled(
        device(list(range(10, 16))), device([4, 5, 6, 8, 9, 10], torch.int64), device([0, 1, 2, 3, 4, 5], torch.int64),
        device([1, 1, 1, 0, 0, 0], torch.int64), device([0, 1, 2, 0, 1, 2]), device([8, 5]),
    )  # fmt: skip
    assert tokens.tolist() == [10, -1, -1, 13, 14, 15]
    assert places.tolist() == [4, 5, 6, 8, 9, 10]
