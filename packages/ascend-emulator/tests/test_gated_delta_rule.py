# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The gated delta rule, recurrent and in chunks, against its recurrence in float64 (golden
functions of op-plugin's tests)."""

import sys
from pathlib import Path

import gated_delta_calls as calls
import pytest
import torch
import torch_npu
from gated_delta_calls import inputs, int32


def golden(query, key, value, state, beta, g, scale, of_keys=None):
    """Output and the state after each token of one sequence, in float64; ``state`` is ``[heads,
    values, keys]``."""
    query, key, value, state, beta = (x.double() for x in (query, key, value, state, beta))
    decay = torch.ones_like(beta) if g is None else g.double().exp()
    outputs, states = torch.empty_like(value), []
    for token in range(len(value)):
        for head in range(value.shape[1]):
            group = head // (value.shape[1] // key.shape[1])
            before = state[head] * decay[token, head]
            if of_keys is not None:
                before = before @ of_keys[token, head].double().exp().diag()
            error = (value[token, head] - before @ key[token, group]) * beta[token, head]
            state = state.clone()
            state[head] = before + torch.outer(error, key[token, group])
            outputs[token, head] = state[head] @ query[token, group] * scale
        states.append(state)
    return outputs, states


def close(result, wanted):
    torch.testing.assert_close(result.cpu().double(), wanted, rtol=2**-8, atol=2**-9)


@pytest.mark.parametrize("accepted", [None, (2, 1, 3)])
@pytest.mark.parametrize("decays", ["heads", "keys", ""])
def test_recurrent_rule_writes_the_state_after_each_token(accepted, decays):
    lengths = (3, 1, 4)
    query, key, value, state, beta, g = inputs(sum(lengths), blocks=12)
    g = g * 20 if decays == "heads" else None  # the recurrent rule has no bound
    gk = -torch.rand(*beta.shape, query.shape[-1]) if decays == "keys" else None
    blocks = torch.randperm(12)[: sum(lengths)]
    on_npu = state.npu()
    out = torch_npu.npu_recurrent_gated_delta_rule(
        query.npu(),
        key.npu(),
        value.npu(),
        on_npu,
        beta=beta.npu(),
        scale=0.5,
        actual_seq_lengths=int32(*lengths),
        ssm_state_indices=blocks.int().npu(),
        num_accepted_tokens=accepted and int32(*accepted),
        g=None if g is None else g.npu(),
        gk=None if gk is None else gk.npu(),
    )
    start, expected = 0, state.double()
    for request, length in enumerate(lengths):
        part = slice(start, start + length)
        first = blocks[start + (accepted[request] - 1 if accepted else 0)]
        parts = [x[part] for x in (query, key, value)]
        outputs, states = golden(
            *parts,
            state[first],
            beta[part],
            None if g is None else g[part],
            0.5,
            None if gk is None else gk[part],
        )
        close(out[part], outputs)
        for token, after in enumerate(states):
            expected[blocks[start + token]] = after
        start += length
    close(on_npu, expected)


@pytest.mark.parametrize("lengths", [(100, 1, 37), (8,)])
@pytest.mark.parametrize("decays", [True, False])
def test_chunk_rule_returns_the_last_states(lengths, decays):
    """Sequences of more than 8 tokens, as in the example of the documentation that allows 8, and as
    in op-plugin's test."""
    query, key, value, state, beta, g = inputs(sum(lengths), blocks=len(lengths))
    on_npu = state.npu()
    out, final = torch_npu.npu_chunk_gated_delta_rule(
        query.npu(),
        key.npu(),
        value.npu(),
        beta=beta.npu(),
        initial_state=on_npu,
        actual_seq_lengths=int32(*lengths),
        scale=0.125,
        g=g.npu() if decays else None,
    )
    assert torch.equal(on_npu.cpu(), state)
    assert final.dtype == torch.bfloat16
    start = 0
    for request, length in enumerate(lengths):
        part = slice(start, start + length)
        parts = [x[part] for x in (query, key, value)]
        outputs, states = golden(
            *parts, state[request], beta[part], g[part] if decays else None, 0.125
        )
        close(out[part], outputs)
        close(final[request], states[-1])
        start += length


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            lambda: calls.recurrent(state=inputs(2)[3].float()),
            r"state is Float \(DT_FLOAT\); allowed: BFloat16",
        ),
        (
            lambda: calls.recurrent(beta=inputs(2)[4].float()),
            r"beta is Float \(DT_FLOAT\); allowed: BFloat16",
        ),
        (
            lambda: calls.recurrent(g=inputs(2)[5].bfloat16()),
            r"g is BFloat16 \(DT_BFLOAT16\); allowed: Float",
        ),
        (lambda: calls.recurrent(state=inputs(1)[3]), "state has 1 blocks"),
        (
            lambda: calls.recurrent(gk=torch.zeros(2, calls.KEY_HEADS, calls.WIDTH)),
            "dimension 1 of gk is 2 and dimension 1 of value is 4",
        ),
        (
            lambda: calls.recurrent(settings={"width": 520}),
            "dimension 2 of query is 520; allowed: 1 to 512",
        ),
        (lambda: calls.chunk(settings={"width": 64}), "dimension 2 of query is 64; allowed: 128"),
        (
            lambda: calls.chunk(settings={"heads": 66}),
            "dimension 1 of value is 66; allowed: 1 to 64",
        ),
        (lambda: calls.chunk(settings={"heads": 3}), "query has 2 heads and value 3"),
        (
            lambda: calls.chunk(state=inputs(1)[3].float()),
            r"state is Float \(DT_FLOAT\); allowed: BFloat16",
        ),
    ],
)
def test_shapes_and_dtypes_beyond_the_documentation_are_refused(case, message):
    with pytest.raises(RuntimeError, match=message):
        case()


def test_values_beyond_the_documentation_are_refused(run):
    done = run("run", "--npus", "1", "--", sys.executable, str(Path(calls.__file__)))
    log = done.stderr.split("CASE ")[1:]
    assert len(log) == len(calls.OF_VALUES), done.stderr
    for message, text in zip(calls.OF_VALUES, log, strict=True):
        assert message in text
