# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Kimi delta attention, compared with its formula in float64, token by token."""

import itertools

import pytest
import torch
from ascend_models.common import kda

HEADS, KEYS, VALUES = 2, 32, 16


def inputs(tokens: int, strongest: float) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    return {
        "q": kda.normalize(draw(tokens, HEADS, KEYS)) * KEYS**-0.5,
        "k": kda.normalize(draw(tokens, HEADS, KEYS)),
        "v": draw(tokens, HEADS, VALUES),
        "g": -torch.rand(tokens, HEADS, KEYS, generator=random) * strongest,
        "beta": draw(tokens, HEADS).sigmoid(),
    }


def by_tokens(
    states: torch.Tensor, starts: list[int], **given: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, in float64: the outputs, and the states after the last token of each request."""
    q, k, v, g, beta = (given[name].double() for name in ("q", "k", "v", "g", "beta"))
    states, outputs = states.double().clone(), []
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        for token in range(start, end):
            state = states[request] * g[token].exp()[:, None, :]
            seen = torch.einsum("hvk,hk->hv", state, k[token])
            change = (v[token] - seen) * beta[token][:, None]
            state = state + change[..., None] * k[token][:, None, :]
            states[request] = state
            outputs.append(torch.einsum("hvk,hk->hv", state, q[token]))
    return torch.stack(outputs), states


@pytest.mark.parametrize("strongest", [0.1, 5, 200])
@pytest.mark.parametrize("lengths", [(1, 63), (64,), (130, 5, 16, 17), (1, 1, 300)], ids=str)
def test_prefills_agree_with_the_formula(lengths: tuple[int, ...], strongest: float) -> None:
    """Decays of 200 would overflow as quotients of decays up to each token."""
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    given = inputs(starts[-1], strongest)
    states = torch.randn(len(lengths), HEADS, VALUES, KEYS)
    expected, after = by_tokens(states, starts, **given)
    output, new = kda.chunk_rule(
        **{name: each.npu() for name, each in given.items()},
        states=states.npu(),
        query_start_loc=torch.tensor(starts, dtype=torch.int32).npu(),
    )
    torch.testing.assert_close(output.cpu().double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(new.cpu().double(), after, atol=2e-5, rtol=1e-4)


def test_decodes_agree_with_the_formula() -> None:
    given, states = inputs(3, 1.0), torch.randn(5, HEADS, VALUES, KEYS)
    blocks = torch.tensor([4, 0, 2], dtype=torch.int32)
    expected, after = by_tokens(states[blocks.long()], [0, 1, 2, 3], **given)
    on_npu = states.npu()
    output = kda.recurrent_rule(
        **{name: each.npu() for name, each in given.items()}, states=on_npu, indices=blocks.npu()
    )
    for row, block in ((0, 4), (2, 2)):
        torch.testing.assert_close(output[row].cpu().double(), expected[row], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(on_npu[block].cpu().double(), after[row], atol=1e-5, rtol=1e-4)
    for block in (0, 1, 3):  # Block 0 is no request's.
        assert torch.equal(on_npu[block].cpu(), states[block])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_agree_with_their_formula(lower_bound: float | None) -> None:
    raw, a_log, bias = (
        torch.randn(4, HEADS, KEYS) * 9,
        torch.randn(HEADS),
        torch.randn(HEADS * KEYS),
    )
    logs = raw.double() + bias.double().view(HEADS, KEYS)
    rates = a_log.double().exp()[:, None]
    expected = (
        -rates * torch.log1p(logs.exp())
        if lower_bound is None
        else lower_bound / (1 + (-rates * logs).exp())
    )
    logs_on_npu = kda.gates(raw.npu(), a_log.npu(), bias.npu(), lower_bound)
    torch.testing.assert_close(logs_on_npu.cpu().double(), expected, atol=1e-5, rtol=1e-5)
