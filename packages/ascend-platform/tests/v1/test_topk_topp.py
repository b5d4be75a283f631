# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Top-k and top-p sampling with the fused operators: supported batches and masked logits."""

import types

import numpy
import pytest
import torch
from ascend_platform.worker.v1 import topk_topp
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p_pytorch

WORDS = 2000


class Runner:
    def __init__(self, input_batch):
        self.input_batch = input_batch


@pytest.fixture
def sampler():
    runners = []  # which the samplers do not keep

    def make(ks, mode="raw_logprobs"):
        batch = types.SimpleNamespace(
            top_k_cpu=numpy.array([*ks, 1500]), num_reqs=len(ks), vocab_size=WORDS
        )
        runners.append(Runner(batch))
        return topk_topp.NPUTopKTopPSampler(TopKTopPSampler(mode), runners[-1])

    return make


def inputs(ks, ps):
    torch.manual_seed(0)
    logits = torch.randn(len(ks), WORDS) * 3
    return logits, torch.tensor(ks, dtype=torch.int32), torch.tensor(ps)


@pytest.mark.parametrize("ks", [[1, 5, 1024, WORDS], [5, 1500, 3, WORDS]])
def test_mask_agrees_with_vllm(sampler, ks):
    """With the operator and with the fallback: the operator does not support k between 1024 and
    vocab_size."""
    logits, k, p = inputs(ks, [1.0, 0.7, 0.9, 0.5])
    made = sampler(ks)
    assert made.supports(k) == (1500 not in ks)
    for arguments in ((k, p), (k, None), (None, p), (None, None)):
        expected = apply_top_k_top_p_pytorch(logits.clone(), *arguments)
        found = made.mask_logits(
            logits.to("npu"), *(each if each is None else each.to("npu") for each in arguments)
        )
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("mode", ["processed_logits", "processed_logprobs"])
@pytest.mark.parametrize("ks", [[1, 5, 1024, WORDS], [5, 1500, 3, WORDS]])
def test_sampled_tokens_and_processed_logits(sampler, ks, mode):
    logits, k, p = inputs(ks, [1.0, 0.7, 0.9, 0.5])
    expected = apply_top_k_top_p_pytorch(logits.clone(), k, p)
    tokens, processed = sampler(ks, mode)(logits.to("npu"), {}, k.to("npu"), p.to("npu"))
    assert (expected.gather(1, tokens.cpu().unsqueeze(1)) > -torch.inf).all()
    torch.testing.assert_close(
        processed.cpu(), expected if mode == "processed_logits" else expected.log_softmax(-1)
    )


def test_rejection_samplers_of_two_engines_use_their_requests():
    """The operator does not support a k of the first engine, and all of the second."""

    class Rejection(torch.nn.Module):
        def forward(self, *arguments):
            return rejection_sampler.apply_top_k_top_p(*arguments)

    engines, batches = [], ([5, 1500, 3, WORDS], [1, 5, 1024, WORDS])
    for ks in batches:
        runner = Runner(
            types.SimpleNamespace(top_k_cpu=numpy.array(ks), num_reqs=len(ks), vocab_size=WORDS)
        )
        runner.sampler = types.SimpleNamespace(topk_topp_sampler=TopKTopPSampler("raw_logprobs"))
        runner.rejection_sampler = Rejection()
        topk_topp.install(runner)
        engines.append(runner)
    for number in (0, 1, 0):
        given = inputs(batches[number], [0.9, 1.0, 0.7, 0.5])
        found = engines[number].rejection_sampler(*(each.to("npu") for each in given))
        assert torch.equal(found.cpu(), apply_top_k_top_p_pytorch(*given))


def test_request_seed_is_reproducible(sampler):
    logits, k, p = (each.to("npu") for each in inputs([WORDS, WORDS], [0.99, 0.99]))

    def once():
        generator = torch.Generator(device="npu").manual_seed(5)
        return sampler([WORDS, WORDS])(logits.clone(), {0: generator}, k, p)[0].tolist()

    found = [once() for _ in range(8)]
    assert len({seeded for seeded, _ in found}) == 1
    assert len({free for _, free in found}) > 1
