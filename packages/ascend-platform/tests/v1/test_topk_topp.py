# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Top-k and top-p sampling with the fused operators: supported batches and masked logits."""

import types

import numpy
import pytest
import torch
from ascend_platform.runners.v1 import sampling_step, topk_topp
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p_pytorch

WORDS = 2000


class Runner:
    """The parts of a model runner that its samplers read."""

    def __init__(self, ks, positions=None):
        self.input_batch = types.SimpleNamespace(
            top_k_cpu=numpy.array([*ks, 1500]), num_reqs=len(ks), vocab_size=WORDS
        )
        if positions is not None:
            self.positions = torch.tensor(positions, device="npu")
            self.logits_indices = torch.arange(len(positions), device="npu")


def sampler(mode="raw_logprobs"):
    return topk_topp.NPUTopKTopPSampler(TopKTopPSampler(mode))


@pytest.fixture(autouse=True)
def stepping(monkeypatch):
    """Let samplers read a runner's step."""

    def step(runner):
        sampling = sampling_step.SamplingStep(runner, None)
        monkeypatch.setattr(sampling_step, "current", lambda: sampling)

    return step


def inputs(ks, ps):
    torch.manual_seed(0)
    logits = torch.randn(len(ks), WORDS) * 3
    return logits, torch.tensor(ks, dtype=torch.int32), torch.tensor(ps)


@pytest.mark.parametrize("ks", [[1, 5, 1024, WORDS], [5, 1500, 3, WORDS], [1500, 1025, 1999, 1100]])
def test_mask_agrees_with_vllm(stepping, ks):
    """With the operator, and with a row that vLLM's implementation masks: the operator does not
    support k between 1024 and vocab_size."""
    logits, k, p = inputs(ks, [1.0, 0.7, 0.9, 0.5])
    stepping(Runner(ks))
    for arguments in ((k, p), (k, None), (None, p), (None, None)):
        expected = apply_top_k_top_p_pytorch(logits.clone(), *arguments)
        actual = topk_topp.mask_logits(
            logits.to("npu"), *(each if each is None else each.to("npu") for each in arguments)
        )
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("mode", ["processed_logits", "processed_logprobs"])
@pytest.mark.parametrize("ks", [[1, 5, 1024, WORDS], [5, 1500, 3, WORDS]])
def test_sampled_tokens_and_processed_logits(stepping, ks, mode):
    logits, k, p = inputs(ks, [1.0, 0.7, 0.9, 0.5])
    stepping(Runner(ks))
    expected = apply_top_k_top_p_pytorch(logits.clone(), k, p)
    tokens, processed = sampler(mode)(logits.to("npu"), {}, k.to("npu"), p.to("npu"))
    assert (expected.gather(1, tokens.cpu().unsqueeze(1)) > -torch.inf).all()
    torch.testing.assert_close(
        processed.cpu(), expected if mode == "processed_logits" else expected.log_softmax(-1)
    )


def generator(seed):
    return torch.Generator(device="npu").manual_seed(seed)


def sample(stepping, rows, seeds, positions):
    """Tokens of rows of logits, k and p, with a seed or None for each."""
    logits, k, p = (each.to("npu") for each in rows)
    stepping(Runner(k.tolist(), positions))
    generators = {row: generator(seed) for row, seed in enumerate(seeds) if seed is not None}
    return sampler()(logits.clone(), generators, k, p)[0].tolist()


def test_seed_and_position_decide_without_the_other_rows(stepping):
    ks = [WORDS, 50, 7, 1500]
    rows = inputs(ks, [0.99, 0.9, 1.0, 1.0])
    seeds, positions = [5, 5, -3, (1 << 63) - 1], [0, 41, 7, 130]
    together = sample(stepping, rows, seeds, positions)
    for row in range(len(ks)):
        only = [each[row : row + 1] for each in rows]
        got = sample(stepping, only, seeds[row : row + 1], positions[row : row + 1])
        assert got == together[row : row + 1]
        beside = [torch.cat([each, each]) for each in only]
        beside[1][1] = 1500  # The operator ignores the k of the other row.
        wide = sample(stepping, beside, [seeds[row], None], [positions[row], 9])
        assert wide[0] == together[row]
    drawn = {sample(stepping, rows, seeds, [at] * 4)[0] for at in range(12)}
    assert len(drawn) > 1


def test_rows_without_a_seed_are_random(stepping):
    rows = inputs([WORDS, WORDS], [0.99, 0.99])
    result = [sample(stepping, rows, [5, None], [3, 3]) for _ in range(8)]
    assert len({seeded for seeded, _ in result}) == 1
    assert len({free for _, free in result}) > 1


def test_seeded_tokens_have_their_distribution(stepping):
    """One seed, many positions, as in a long answer."""
    count, words = 6000, 8
    torch.manual_seed(1)
    logits = torch.randn(words)
    stepping(Runner([WORDS] * count, range(count)))
    generators = dict.fromkeys(range(count), generator(11))
    given = logits.expand(count, -1).contiguous().npu()
    tokens = sampler()(given, generators, None, None)[0].cpu()
    expected = logits.double().softmax(-1) * count
    statistic = ((tokens.bincount(minlength=words) - expected) ** 2 / expected).sum()
    assert statistic < 40  # With 7 degrees of freedom, exceeded in one of 10^6 cases.
