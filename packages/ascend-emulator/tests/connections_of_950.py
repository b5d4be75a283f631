# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Hyper-connections and causal convolutions of Ascend950, against float64; test_ascend950.py runs
these tests on that chip."""

import pytest
import torch
import torch_npu
from cann_calls import Calls


def same(actual, expected):
    torch.testing.assert_close(actual.cpu().double(), expected.double(), atol=0, rtol=0)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("shape", [(5, 4, 32), (2, 3, 6, 16)])
def test_hyper_connections_before_a_layer(shape, residual):
    torch.manual_seed(0)
    n, width = shape[-2], shape[-2] * shape[-1]
    rows = n * n + 2 * n if residual else 2 * n
    x, phi = torch.randn(shape).bfloat16(), torch.randn(rows, width) / 8
    alpha, bias = torch.rand(3 if residual else 2), torch.randn(rows) / 8
    gamma = torch.rand(n, shape[-1]) + 0.5
    outputs = torch_npu.npu_mhc_pre(
        x.npu(), phi.npu(), alpha.npu(), bias.npu(), gamma=gamma.npu(), hc_eps=1e-3, out_flag=1
    )
    wide, scale = x.double(), alpha.double()
    flat = wide.flatten(-2)
    rstd = (flat.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    mix = (flat * gamma.double().flatten()) @ phi.double().t()
    weights, shift = mix * rstd, bias.double()
    pre = torch.sigmoid(weights[..., :n] * scale[0] + shift[:n]) + 1e-3
    post = 2 * torch.sigmoid(weights[..., n : 2 * n] * scale[1] + shift[n : 2 * n])
    h_in = (pre[..., None] * wide).sum(-2)
    tail = weights[..., 2 * n :] * scale[2] + shift[2 * n :] if residual else None
    close_sums = {"rtol": 1e-4, "atol": 1e-4}
    for actual, expected in zip(
        outputs[1:2] + outputs[3:], (post, rstd[..., 0], mix, pre), strict=True
    ):
        torch.testing.assert_close(actual.cpu().double(), expected, **close_sums)
    torch.testing.assert_close(outputs[0].cpu().double(), h_in, rtol=2**-7, atol=1e-2)
    if residual:
        matrix = tail.unflatten(-1, (n, n))
        torch.testing.assert_close(outputs[2].cpu().double(), matrix, **close_sums)
    else:
        assert outputs[2].cpu().tolist() == [0]


def test_the_earlier_version_of_mhc_pre_gives_the_same():
    x, phi = torch.randn(3, 4, 16).bfloat16().npu(), torch.randn(24, 64).npu()
    given = (x, phi, torch.rand(3).npu(), torch.rand(24).npu(), None)
    outputs = torch_npu.npu_mhc_pre(*given[:4])[:3]
    again = [torch.zeros_like(each) for each in outputs]
    status, message = Calls().run("MhcPre", *given, 1e-6, 1e-6, *again, None, None, None)
    assert status == 0, message
    for one, other in zip(outputs, again, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def test_rounded_inputs_of_the_cube():
    x, phi = torch.ones(1, 4, 16).bfloat16(), torch.full((24, 64), 1 + 2.0**-11)
    mix = torch_npu.npu_mhc_pre(
        x.npu(), phi.npu(), torch.ones(3).npu(), torch.zeros(24).npu(), out_flag=1, inner_precise=1
    )[4]
    same(mix, torch.full((1, 24), 64 * (1 + 2.0**-10)))


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("shape", [(5, 4, 32), (2, 3, 8, 16)])
def test_hyper_connections_behind_a_layer(shape, mixed):
    torch.manual_seed(0)
    n = shape[-2]
    x, h_out = torch.randn(shape).half(), torch.randn(*shape[:-2], shape[-1]).half()
    h_res, h_post = torch.rand(*shape[:-2], n, n), torch.rand(*shape[:-2], n)
    y = torch_npu.npu_mhc_post(x.npu(), h_res.npu() if mixed else None, h_out.npu(), h_post.npu())
    streams = h_res.double().mT @ x.double() if mixed else x.double()
    expected = streams + h_post.double()[..., None] * h_out.double()[..., None, :]
    torch.testing.assert_close(y.cpu().double(), expected, rtol=2**-10, atol=2e-3)


@pytest.mark.parametrize("iterations", [1, 20])
def test_doubly_stochastic_matrices(iterations):
    torch.manual_seed(0)
    x = torch.randn(2, 7, 6, 6)
    y = torch_npu.npu_mhc_sinkhorn(x.npu(), eps=1e-4, num_iters=iterations)[0]
    matrix = torch.softmax(x.double(), -1) + 1e-4
    for dim in [-2, *[-1, -2] * (iterations - 1)]:
        matrix = matrix / (matrix.sum(dim, keepdim=True) + 1e-4)
    torch.testing.assert_close(y.cpu().double(), matrix, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="out_flag 1 is not emulated"):
        torch_npu.npu_mhc_sinkhorn(x.npu(), out_flag=1)


def convolved(x, weight, states, lines, offset, begins=False):
    """The result of one sequence, and its cache, by the sum of three taps in float64."""
    depth, rows = states.shape[1], x.shape[0]
    cached = torch.zeros_like(states[0, :2]) if begins else states[lines][: offset + 2]
    rows_of_all = torch.cat([cached, x])
    padded = rows_of_all[0 if begins else offset :].double()
    y = sum(padded[tap : tap + rows] * weight[tap].double() for tap in range(3))
    cache = states[lines].clone()
    kept = min(depth, len(rows_of_all))
    cache[depth - kept :] = rows_of_all[len(rows_of_all) - kept :]
    return y, cache, padded


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("residual", [0, 1])
def test_causal_convolution_of_packed_sequences(residual, inplace):
    torch.manual_seed(0)
    starts, lines, done = [0, 5, 8, 9, 16], [0, 3, -1, 5], [4, 0, 2, 1]
    x, weight = torch.randn(16, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    states = torch.randn(6, 2, 64).bfloat16()
    cache, given = states.npu(), [torch.tensor(each).int().npu() for each in (starts, lines, done)]
    if inplace:
        y = x.npu()
        arguments = (y, weight.npu(), cache, given[0], given[1], None, None, None, given[2])
        status, message = Calls().run(
            "InplaceFusedCausalConv1d", *arguments, *[None] * 3, 0, -1, 0, 8, residual, 128, 1
        )
        assert status == 0, message
    else:
        y = torch_npu.npu_fused_causal_conv1d(
            x.npu(),
            weight.npu(),
            cache,
            query_start_loc=given[0],
            cache_indices=given[1],
            num_computed_tokens=given[2],
            residual_connection=residual,
            conv_mode="pangu",
        )
    for first, last, line, computed in zip(starts, starts[1:], lines, done, strict=False):
        if line == -1:  # It is left out.
            continue
        rows = x[first:last]
        expected, stored, _ = convolved(rows, weight, states, line, 0, begins=computed == 0)
        expected[: max(2 - computed, 0)] = 0
        expected = expected + residual * rows.double()
        torch.testing.assert_close(y.cpu()[first:last].double(), expected, rtol=2**-7, atol=1e-2)
        same(cache[line], stored)
    for line in {1, 2, 4}:
        same(cache[line], states[line])


def test_causal_convolution_of_drafts():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4, 64).half(), torch.randn(3, 64).half()
    states, accepted = torch.randn(3, 5, 64).half(), [1, 4, 2]
    cache = states.npu()
    y = torch_npu.npu_fused_causal_conv1d(
        x.npu(), weight.npu(), cache, num_accepted_tokens=torch.tensor(accepted).int().npu()
    )
    for batch, count in enumerate(accepted):
        expected, stored, _ = convolved(x[batch], weight, states, batch, count - 1)
        torch.testing.assert_close(y[batch].cpu().double(), expected, rtol=2**-9, atol=2e-3)
        same(cache[batch], stored)


def test_causal_convolution_with_cached_prefixes():
    torch.manual_seed(0)
    x, weight = torch.randn(300, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    states = torch.randn(8, 2, 64).bfloat16()
    blocks = torch.tensor([[6, 1, 4, 2]], dtype=torch.int32)
    cache, done = states.npu(), 100
    one = {
        name: torch.tensor([value], dtype=torch.int32).npu()
        for name, value in {
            "num_computed_tokens": done,
            "block_idx_first_scheduled_token": 0,
            "block_idx_last_scheduled_token": 3,
            "initial_state_idx": 0,
        }.items()
    }
    y = torch_npu.npu_fused_causal_conv1d(
        x.npu(),
        weight.npu(),
        cache,
        query_start_loc=torch.tensor([0, 300], dtype=torch.int32).npu(),
        cache_indices=blocks.npu(),
        block_size=128,
        **one,
    )
    expected, stored, padded = convolved(x, weight, states, 6, 0)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=2**-7, atol=1e-2)
    same(cache[2], stored)
    # The blocks end behind 128, 256 and 384 tokens, of which 100 were computed before.
    for block, end in ((6, 28), (1, 156), (4, 284)):
        same(cache[block], padded[end : end + 2])


@pytest.mark.parametrize(
    ("rule", "call"),
    [
        (
            "mhc_sinkhorn.iterations, documented",
            lambda x, w: torch_npu.npu_mhc_sinkhorn(torch.ones(2, 4, 4).npu(), num_iters=101),
        ),
        (
            "mhc_post.x, documented",
            lambda x, w: torch_npu.npu_mhc_post(
                x[None].half(), None, x[0, None].half(), torch.ones(1, 4).npu()
            ),
        ),
        (
            "causal_conv1d.starts, documented",
            lambda x, w: torch_npu.npu_fused_causal_conv1d(
                x, torch.ones(3, 64).bfloat16().npu(), torch.ones(4, 2, 64).bfloat16().npu()
            ),
        ),
    ],
)
def test_limits(rule, call):
    with pytest.raises(RuntimeError, match=f"rule {rule}"):
        call(torch.ones(5, 64).bfloat16().npu(), torch.ones(64).npu())
