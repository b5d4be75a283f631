# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sampling and log-probabilities of the V2 runner, compared with a loop for each kernel of vLLM's,
and with the distribution."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ascend_platform.overrides import table
from harness.references.v2_batches import VOCABULARY, WIDTH, Batch, device
from packaging.version import Version
from vllm import __version__ as vllm_version

if Version(vllm_version).release < Version(table.V2_SINCE).release:
    pytest.skip("vLLM's V2 runner is another", allow_module_level=True)

from ascend_platform.runners.v2.kernels import buffers, gumbel, input_batch, sample
from ascend_platform.runners.v2.kernels.step import running
from ascend_platform.runners.v2.sampler import NUM_PROCESSORS, NPUSampler
from vllm import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.states import RequestState


@pytest.mark.parametrize("seed", range(4))
def test_log_probabilities_and_ranks(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, VOCABULARY, generator=generator).bfloat16()
    ids = torch.randint(VOCABULARY, (5, 3), generator=generator)
    expected = logits.double().log_softmax(-1).gather(-1, ids)
    got = sample.compute_token_logprobs(logits.npu(), ids.npu())
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    ranks = device([0] * 5, torch.int64)
    sample.rank_tokens(
        ranks, logits.npu(), VOCABULARY, ids[:, 0].npu(), VOCABULARY, BLOCK_SIZE=8192
    )
    chosen = [float(logits[row, ids[row, 0]]) for row in range(5)]
    assert ranks.tolist() == [
        sum(float(each) >= chosen[row] for each in logits[row]) for row in range(5)
    ]


def test_logits_that_are_no_numbers_are_counted() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 2:5] = logits[2, 0] = torch.nan
    logits[0, 0] = torch.inf
    assert sample.get_num_nans(logits.bfloat16().npu()).tolist() == [0, 3, 1]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(
    ("seed", "empty"), [(seed, empty) for seed in range(4) for empty in (False, True)]
)
def test_tokens_of_prompts_to_score(seed: int, empty: bool, on_host: bool) -> None:
    batch = Batch(seed, empty=empty)
    batch.computed[batch.rows[0]] = WIDTH - batch.lengths[0]  # the row's last token
    with running(batch.make_host_step() if on_host else batch.make_device_step()):
        got = input_batch.get_prompt_logprobs_token_ids(
            batch.num_tokens,
            batch.query_start_loc(0),
            device(batch.rows, torch.int64),
            device(batch.computed),
            device(batch.tokens),
        ).tolist()
    for number, row in enumerate(batch.rows):
        for offset in range(batch.lengths[number]):
            following = batch.computed[row] + offset + 1
            if following < WIDTH:
                assert got[batch.starts[number] + offset] == batch.tokens[row][following]


@pytest.mark.parametrize("seed", range(4))
def test_temperature_and_min_p(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = torch.randn(5, VOCABULARY, generator=generator)
    rows = [rng.randrange(4) for _ in range(5)]
    temperatures, min_p = [0.0, 1.0, 0.3, 2.0], [0.0, 0.5, 0.1, 0.9]
    got, mapping = logits.npu(), device(rows, torch.int64)
    gumbel.apply_temperature(got, mapping, device(temperatures, torch.float32))
    for number, row in enumerate(rows):
        logits[number] /= temperatures[row] or 1
    torch.testing.assert_close(got.cpu(), logits)
    sample.apply_min_p(got, mapping, device(min_p, torch.float32))
    for number, row in enumerate(rows):
        shares = logits[number].softmax(-1)
        logits[number][shares < min_p[row] * shares.max() * (1 - 1e-6)] = -torch.inf
    torch.testing.assert_close(got.cpu(), logits)


@pytest.mark.parametrize("top", [0, 2, 4, 7])
def test_requested_log_probabilities(top: int) -> None:
    """Also where there are more of the most probable tokens than a request may name."""
    counts, requested = [0, 3, 1], [[9] * 5, [4, 5, 6, 9, 9], [7, 9, 9, 9, 9]]
    rows, sampled, best = [2, 0, 1, 0], [30, 31, 32, 33], [[*range(20, 27)]] * 4
    width = max(top, 3)
    ids, valid = (
        torch.zeros(4, 1 + width, dtype=torch.int64).npu(),
        torch.zeros(4, 1 + width, dtype=torch.bool).npu(),
    )
    given = (
        device(sampled, torch.int64),
        device([row[: max(top, 1)] for row in best]),
        top,
        device(rows, torch.int64),
    )
    sample.fill_logprob_token_ids(
        ids, 0, valid, 0, *given, device(counts), device(requested), 5, NUM_TOPK=top, PADDED_COLS=8
    )
    for number, row in enumerate(rows):
        wanted = [
            sampled[number],
            *(requested[row][: counts[row]] if counts[row] else best[0][:top]),
        ]
        assert ids[number].tolist() == wanted + [0] * (1 + width - len(wanted))
        assert valid[number].tolist() == [place < len(wanted) for place in range(1 + width)]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (3, 0.9), (None, 0.7), (2000, 0.8)])
def test_draws_have_their_distribution(
    seeded: bool, top_k: int | None, top_p: float | None
) -> None:
    """By the fused operator, and, with a top-k that it ignores, by vLLM's own mask; greedy rows are
    the argmax."""
    rows, vocabulary = 3000, 2500
    torch.manual_seed(0)
    np.random.seed(0)
    logits = torch.full((vocabulary,), -30.0)
    logits[:6] = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, -4.0])
    temperature = np.ones(rows, np.float32)
    temperature[::10] = 0
    k = np.full(rows, top_k or vocabulary, np.int32)
    states = SimpleNamespace(
        vocab_size=vocabulary,
        temperature=SimpleNamespace(
            np=temperature, gpu=device(temperature.tolist(), torch.float32)
        ),
        top_k=SimpleNamespace(np=k),
        seeds=SimpleNamespace(gpu=torch.randint(-(1 << 62), 1 << 62, (rows,)).npu()),
        any_explicit_seed=lambda rows: seeded,
    )
    sampler = NPUSampler.__new__(NPUSampler)
    vars(sampler).update(
        logprobs_mode="raw_logprobs",
        return_sampling_mask=False,
        use_fp64_gumbel=False,
        sampling_states=states,
    )
    arguments = (
        torch.arange(rows).npu(), np.arange(rows), torch.arange(rows).npu(),
        None if top_k is None else device(k.tolist()), None if top_p is None else torch.full((rows,), top_p).npu(),
        False, False,
    )  # fmt: skip

    def draw() -> torch.Tensor:
        return sampler._sample_random(logits.expand(rows, -1).contiguous().npu(), *arguments)[
            0
        ].cpu()

    tokens = draw()
    assert (tokens[::10] == 0).all()
    if seeded:
        assert (draw() == tokens).all()
    drawn = tokens[torch.tensor(temperature) > 0]
    shares = logits.double().softmax(-1)
    shares = shares * (torch.arange(vocabulary) < (top_k or vocabulary))
    shares = shares / shares.sum()
    shares = shares * (shares.cumsum(0) - shares < (top_p or 1))
    expected = shares / shares.sum() * len(drawn)
    actual = torch.bincount(drawn, minlength=vocabulary)
    assert actual[expected == 0].sum() == 0
    kept = expected >= 5
    statistic = ((actual - expected)[kept] ** 2 / expected[kept]).sum() / 2
    freedom = torch.tensor(max(1.0, float(kept.sum() - 1)) / 2).double()
    assert torch.special.gammaincc(freedom, statistic) > 1e-4


def test_states_are_copied_where_a_request_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_utils, "is_uva_available", buffers.is_uva_available)
    monkeypatch.setattr(buffer_utils, "UvaBufferPool", buffers.PinnedBufferPool)
    monkeypatch.setattr(buffer_utils.UvaBackedTensor, "copy_to_uva", buffers.copy_changed)
    monkeypatch.setattr(buffer_utils.StagedWriteTensor, "apply_write", buffers.apply_writes)
    npu = torch.device("npu")
    requests = RequestState(2, WIDTH, WIDTH, 0, VOCABULARY, npu)
    config = SimpleNamespace(speculative_config=None, reasoning_config=None)
    sampler = NPUSampler(config, 2, VOCABULARY, npu, requests)
    assert len(sampler.logits_processors) == NUM_PROCESSORS
    temperature = sampler.sampling_states.temperature
    sampler.add_request(1, SamplingParams(temperature=0.5))
    sampler.apply_staged_writes()
    assert temperature.gpu.tolist() == [0, 0.5]
    temperature.np[0] = 2  # by nothing in vLLM
    sampler.apply_staged_writes()
    assert temperature.gpu.tolist() == [0, 0.5]
    written = []
    sampler.logits_processors.append(SimpleNamespace(apply_staged_writes=lambda: written.append(1)))
    sampler.apply_staged_writes()  # As a user's logits processor may require it, in each step.
    assert (temperature.gpu.tolist(), written) == ([2, 0.5], [1])
