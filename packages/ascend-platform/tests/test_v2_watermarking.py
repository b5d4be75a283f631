# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Watermarking of the V2 runner: vLLM's random numbers bit for bit, its repeated contexts, and its
tokens on the CPU."""

import random

import numpy as np
import pytest
import torch
from ascend_platform.overrides import table
from packaging.version import Version
from vllm import __version__ as vllm_version

if Version(vllm_version).release < Version(table.V2_SINCE).release:
    pytest.skip("vLLM's V2 runner is another", allow_module_level=True)

from ascend_platform.runners.v2.kernels import rejection, watermark
from ascend_platform.runners.v2.kernels.device_step import DeviceStep
from ascend_platform.runners.v2.kernels.host_step import HostStep
from ascend_platform.runners.v2.kernels.step import running
from vllm.v1.watermarking.gumbel import GumbelWatermarker
from vllm.v1.watermarking.prfs import PhiloxPRF
from vllm.v1.worker.gpu.sample import watermark as reference


@pytest.mark.parametrize("key", [0, 1, 0x123456789ABCDEF0, 0xFEDCBA9876543210, 2**64 - 1])
@pytest.mark.parametrize("width", [1, 2, 4, 5, 8, 11])
@pytest.mark.parametrize("vocabulary", [1, 5, 1000])
def test_uniform_numbers_are_those_of_the_detector(key: int, width: int, vocabulary: int) -> None:
    contexts = torch.randint(
        -1, 200_000, (3, width), generator=torch.Generator().manual_seed(width)
    )
    expected = PhiloxPRF(key).uniform(contexts, torch.arange(vocabulary))
    got = watermark.philox_uniform(key, contexts.int().npu(), vocabulary).cpu()
    assert torch.equal(got, expected)
    assert 0 < got.min() <= got.max() < 1


def test_tokens_are_those_of_vllm_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rows are too many for one part."""
    generator = torch.Generator().manual_seed(0)
    logits, contexts = (
        torch.randn(50, 1000, generator=generator),
        torch.randint(-1, 1000, (50, 4), generator=generator),
    )
    monkeypatch.setattr(watermark, "_NUMBERS_AT_ONCE", 7500)
    watermarker = GumbelWatermarker(7)
    expected = watermarker._sample_watermarked(logits, contexts).token_ids
    got = watermark.sample_watermarked(watermarker, logits.npu(), contexts.npu()).token_ids
    assert got.tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 40


STATES, LENGTH = 40, 24


class States:
    """Requests whose tokens have many repetitions, on the CPU."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.tokens = torch.tensor(
            [[self.draw.randrange(3) for _ in range(LENGTH)] for _ in range(STATES)],
            dtype=torch.int32,
        )
        self.prompts = torch.tensor(
            [self.draw.randint(1, 12) for _ in range(STATES)], dtype=torch.int32
        )
        self.totals = torch.tensor(
            [self.draw.randint(int(prompt), LENGTH) for prompt in self.prompts], dtype=torch.int32
        )

    def context(self, row: int, width: int, drafts: list[int]) -> list[int]:
        """The last tokens of an answer with draft tokens."""
        return (
            [-1] * width + self.tokens[row, self.prompts[row] : self.totals[row]].tolist() + drafts
        )[-width:]

    def arguments(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.tokens, rows, self.prompts, self.totals


def on_device(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.npu() for tensor in tensors)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("scope", ["single_turn", "all"])
@pytest.mark.parametrize("max_history", [None, 1, 6, 8192])
@pytest.mark.parametrize("width", [1, 3])
def test_repeated_contexts(width: int, max_history: int | None, scope: str, on_host: bool) -> None:
    states = States(width)
    rows = torch.tensor([*states.draw.sample(range(STATES), 36), -1])
    contexts = torch.tensor([states.context(row, width, []) for row in rows.tolist()])
    named = {"include_prompt": scope == "all", "skip_partial_context": scope == "all"}
    expected = reference._repeated_context_mask_cpu(
        *states.arguments(rows), contexts, max_history, **named
    ).tolist()
    known, ones = states.totals[rows.clamp(min=0)].numpy(), np.ones(len(rows), np.int64)
    of_host = HostStep(rows.numpy(), ones, known - 1, known - 1, states.tokens)
    with running(of_host if on_host else DeviceStep(ones, False)):
        given = on_device((*states.arguments(rows), contexts))
        got = watermark.repeated_context_mask(*given, max_history, **named).tolist()
    assert got == expected
    assert {*got} == {False, True}


@pytest.mark.parametrize("scope", ["single_turn", "all"])
@pytest.mark.parametrize("max_history", [None, 2, 8192])
@pytest.mark.parametrize("width", [1, 2])
def test_repeated_contexts_of_draft_tokens(width: int, max_history: int | None, scope: str) -> None:
    """Of the target model, whose rows are a request's draft tokens, and of the drafter, step by
    step."""
    states, requests, steps = States(width), 20, 3
    chosen = states.draw.sample(range(STATES), requests)
    drafts = [[states.draw.randrange(3) for _ in range(steps)] for _ in chosen]
    each = [
        (row, given[:place])
        for row, given in zip(chosen, drafts, strict=True)
        for place in range(steps + 1)
    ]
    rows, places = (
        torch.tensor([row for row, _ in each]),
        torch.tensor([len(given) for _, given in each]),
    )
    contexts = torch.tensor([states.context(row, width, given) for row, given in each])
    named = {"include_prompt": scope == "all", "num_speculative_steps": steps}
    arguments = *states.arguments(rows), contexts
    expected = reference.repeated_context_mask(
        *arguments, max_history, **named, history_offsets=places, local_positions=places
    ).tolist()
    got = watermark.repeated_context_mask(
        *on_device(arguments),
        max_history,
        **named,
        history_offsets=places.npu(),
        local_positions=places.npu(),
    ).tolist()
    assert got == expected
    assert {*got} == {False, True}

    prior, enabled = (
        torch.zeros(requests, steps, width, dtype=torch.int64),
        torch.tensor([True] * (requests - 2) + [False] * 2),
    )
    on_npu, marked = prior.npu(), []
    for step in range(steps):
        draft_contexts = torch.tensor(
            [
                states.context(row, width, given[:step])
                for row, given in zip(chosen, drafts, strict=True)
            ]
        )
        given = draft_contexts, torch.full((requests,), step), enabled, max_history, scope == "all"
        of_states = states.arguments(torch.tensor(chosen))
        marked += reference.draft_watermarking_mask(*of_states, prior, *given).tolist()
        moved = on_device((*of_states, on_npu, *given[:3]))
        assert watermark.draft_watermarking_mask(*moved, *given[3:]).tolist() == marked[-requests:]
        assert torch.equal(on_npu.cpu(), prior)
    assert {*marked} == {False, True}


@pytest.mark.parametrize("has_logits", [False, True])
def test_token_after_a_rejected_draft_token_is_of_the_key(has_logits: bool) -> None:
    """From the distribution that is left; the tokens of requests without watermarks, and of masked
    contexts, are not."""
    requests, vocabulary, key = 120, 50, 99
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(requests * 2, vocabulary, generator=generator)
    contexts = torch.randint(vocabulary, (requests * 2, 4), generator=generator)
    rejected = logits[::2].argmin(-1)
    draft_logits = torch.randn(requests, 1, vocabulary, generator=generator).scatter(
        2, rejected[:, None, None], 3.0
    )
    drafted = torch.stack([torch.zeros_like(rejected), rejected], 1).view(-1)
    mapping, places = torch.arange(requests), torch.tensor([0, 1] * requests)
    marking, skipped = mapping % 3 > 0, torch.zeros(requests * 2, dtype=torch.bool)
    skipped[::10] = True
    drafts = draft_logits.npu() if has_logits else None, drafted.npu()
    rows = (
        torch.arange(requests * 2).npu(),
        mapping.npu(),
        mapping.repeat_interleave(2).npu(),
        places.npu(),
    )
    tokens, counts = rejection.rejection_sample(
        logits.npu(),
        *drafts,
        torch.arange(0, requests * 2 + 1, 2, dtype=torch.int32).npu(),
        *rows,
        torch.ones(requests).npu(),
        torch.arange(requests).npu(),
        1,
        contexts=contexts.npu(),
        watermarking=marking.npu(),
        watermarking_skip_mask=skipped.npu(),
        watermark_key=key,
    )
    residual = logits[::2].scatter(1, rejected[:, None], -torch.inf)
    if has_logits:
        residual = (
            (logits[::2].double().softmax(-1) - draft_logits[:, 0].double().softmax(-1))
            .clamp(min=0)
            .log()
        )
    noise = -(-PhiloxPRF(key).uniform(contexts[::2], torch.arange(vocabulary)).log()).log()
    is_of_key = tokens[:, 0].cpu() == (residual + noise).argmax(-1)
    is_rejected, asked = counts.cpu() == 1, marking & ~skipped[::2]
    assert int((is_rejected & asked).sum()) > 50
    assert bool(is_of_key[is_rejected & asked].all())
    assert float(is_of_key[is_rejected & ~asked].float().mean()) < 0.4
