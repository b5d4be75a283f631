# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's rejection sampler on the NPU samples from the target's distribution for any drafts.

Each test is a chi-square test of counts against probabilities in float64, with fixed seeds.
FALSE_ALARM is the probability that a correct sampler fails with other seeds.
"""

import functools
import random
import types

import numpy
import pytest
import torch
from ascend_platform.overrides import guard
from ascend_platform.runners.v1 import sampling_step, topk_topp
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.rejection_sampler import rejection_sample

REQUESTS, DRAFTS, WORDS = 8000, 3, 10
FALSE_ALARM = 1e-6


@pytest.fixture(autouse=True)
def kernels():
    guard.install("v1", "runners.v1.kernels.rejection")


def metadata_of(temperature, generators=None):
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=False,
        all_random=bool((temperature > 0).all()),
        top_p=None,
        top_k=None,
        generators=generators or {},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.empty(0),
        presence_penalties=torch.empty(0),
        repetition_penalties=torch.empty(0),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=None,
    )


def upper_tail(statistic, freedom):
    """P-value of a chi-square statistic."""
    return float(
        torch.special.gammaincc(
            torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2).double()
        )
    )


def check(tokens, probabilities):
    """Chi-square statistic of tokens against float64 probabilities; tokens of probability 0 must
    not occur."""
    counts = torch.bincount(tokens, minlength=WORDS).double()
    assert not counts[probabilities == 0].any()
    expected = probabilities[probabilities > 0] * len(tokens)
    assert expected.min() > 5
    statistic = float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())
    assert upper_tail(statistic, len(expected) - 1) > FALSE_ALARM


@functools.cache
def sampled(kind):
    """Target logits and the tokens ``[REQUESTS, DRAFTS + 1]`` for drafts drawn from another
    distribution, or always the same."""
    torch.manual_seed(7)
    logits = torch.randn(DRAFTS, WORDS, dtype=torch.float64) * 1.5
    logits[1, 2] = -torch.inf  # left out, as by top-k
    if kind == "drawn":
        draft = (torch.randn(DRAFTS, WORDS, dtype=torch.float64) * 1.5).softmax(-1)
        drafts = torch.stack(
            [torch.multinomial(each, REQUESTS, replacement=True) for each in draft], 1
        )
        probabilities = draft.float().repeat(REQUESTS, 1).to("npu")
    else:
        drafts = logits.argmax(-1).repeat(REQUESTS, 1)
        probabilities = None
    torch.npu.manual_seed_all(8)
    out = rejection_sample(
        drafts.flatten().int().to("npu"),
        [DRAFTS] * REQUESTS,
        DRAFTS,
        torch.arange(DRAFTS, DRAFTS * REQUESTS + 1, DRAFTS, dtype=torch.int32, device="npu"),
        probabilities,
        logits.float().repeat(REQUESTS, 1).to("npu"),
        torch.full((REQUESTS, 1), 9, device="npu"),
        metadata_of(torch.ones(REQUESTS, device="npu")),
    )
    return logits, drafts, out.cpu().long()


@pytest.mark.parametrize("kind", ["drawn", "certain"])
def test_each_position_has_the_target_distribution(kind):
    """Tokens after an accepted draft token have the target's distribution of their
    position, too."""
    logits, drafts, out = sampled(kind)
    rows = torch.ones(REQUESTS, dtype=torch.bool)
    for place in range(DRAFTS):
        assert (out[rows, place] >= 0).all()
        check(out[rows, place], logits[place].softmax(-1))
        rows &= out[:, place] == drafts[:, place]
    assert 0 < rows.sum() < REQUESTS
    assert (out[rows, DRAFTS] == 9).all()


def test_wrong_distribution_is_detected():
    logits, drafts, out = sampled("drawn")
    with pytest.raises(AssertionError):
        check(drafts[:, 0], logits[0].softmax(-1))  # as if all drafts were accepted
    with pytest.raises(AssertionError):
        check(out[:, 0], (logits[0] * 1.1).softmax(-1))


def test_seeded_tokens_do_not_depend_on_drafts(monkeypatch):
    """Any drafts, and any division of the positions into steps, give the tokens that the sampler
    gives without drafts."""

    def sample(positions, drafts, generators):
        """Tokens ``[requests, columns]`` of a step with these positions of its logits."""
        rows = torch.tensor(positions, device="npu")
        batch = types.SimpleNamespace(top_k_cpu=numpy.full(len(rows), WORDS), num_reqs=len(rows))
        fields = {"input_batch": batch, "positions": torch.arange(length, device="npu")}
        runner = types.SimpleNamespace(**fields, logits_indices=rows)
        step = sampling_step.SamplingStep(runner, drafts)
        monkeypatch.setattr(sampling_step, "current", lambda: step)
        if drafts is None:
            return sampler(logits[rows], generators, None, None)[0]
        bonus = sampler(logits[rows][drafts.bonus_logits_indices], generators, None, None)[0]
        arguments = drafts.draft_token_ids, drafts.num_draft_tokens, DRAFTS
        return topk_topp.rejection_sample(
            *(*arguments, drafts.cu_num_draft_tokens, None),
            *(logits[rows][drafts.target_logits_indices], bonus[:, None]),
            metadata_of(torch.ones(len(bonus), device="npu"), generators),
        )

    torch.manual_seed(0)
    length, rng = 300, random.Random(0)
    logits = torch.randn(length, WORDS).to("npu")
    sampler = topk_topp.NPUTopKTopPSampler(TopKTopPSampler("raw_logprobs"))
    generator = torch.Generator("npu").manual_seed(5)
    wanted = sample(range(length), None, dict.fromkeys(range(length), generator)).tolist()
    got, accepted = [], 0
    while len(got) + DRAFTS < length:
        at, count = len(got), rng.randrange(DRAFTS + 1)
        drafts = [
            wanted[at + each] if rng.random() < 0.7 else rng.randrange(-1, WORDS)
            for each in range(count)
        ]
        # The second request has no seed.
        metadata = types.SimpleNamespace(
            draft_token_ids=torch.tensor([*drafts, 1], dtype=torch.int32, device="npu"),
            num_draft_tokens=[count, 1],
            cu_num_draft_tokens=torch.tensor([count, count + 1], dtype=torch.int32, device="npu"),
            target_logits_indices=torch.tensor([*range(count), count + 1], device="npu"),
            bonus_logits_indices=torch.tensor([count, count + 2], device="npu"),
        )
        out = sample([*range(at, at + count + 1), 3, 4], metadata, {0: generator})
        tokens = [token for token in out[0].tolist() if token >= 0]
        accepted += len(tokens) - 1
        got += tokens
    assert got == wanted[: len(got)]
    assert accepted > 50
