# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Mixture of experts: initial routing, permutation and what they leave out, against float64 or exact index
arithmetic."""

import sys

import pytest
import torch
import torch_npu
from comparisons import close

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def test_init_routing():
    x, experts = (
        torch.randn(4, 6),
        torch.tensor([[3, 0], [1, 3], [0, 2], [1, 0]], dtype=torch.int32),
    )
    rows = torch.arange(8, dtype=torch.int32).view(2, 4).T.contiguous()
    expanded, places, sorted_experts = torch_npu.npu_moe_init_routing(
        x.npu(), rows.npu(), experts.npu(), 3
    )
    order = experts.view(-1).argsort(stable=True)
    from_rows = rows.reshape(-1)[order].long()
    assert torch.equal(sorted_experts.cpu(), experts.view(-1)[order])
    assert torch.equal(places.cpu().long()[from_rows], torch.arange(8))
    assert torch.equal(expanded.cpu(), x[from_rows[:6] % 4])
    ends = torch_npu.npu_moe_compute_expert_tokens(sorted_experts, 5)
    assert ends.cpu().tolist() == [3, 5, 6, 8, 8]


@pytest.mark.parametrize("quant_mode", [0, 1])
def test_init_routing_quant(quant_mode):
    x, experts = torch.randn(10, 16), torch.randint(0, 4, (10, 3), dtype=torch.int32)
    scale, offset = (
        (torch.tensor([30.0]), torch.tensor([1.0]))
        if quant_mode == 0
        else (torch.rand(4, 16) + 0.5, None)
    )
    rows, places, counts, _, steps = torch_npu.npu_moe_init_routing_quant(
        x.npu(),
        experts.npu(),
        scale=scale.npu(),
        offset=None if offset is None else offset.npu(),
        expert_num=4,
        expert_tokens_num_mode=1,
        quant_mode=quant_mode,
    )
    flat = experts.view(-1)
    order = flat.argsort(stable=True)
    assert torch.equal(places.cpu().long(), order.argsort())
    assert torch.equal(counts.cpu().long(), torch.bincount(flat, minlength=4).cumsum(0))
    wide = x[order // 3].double()
    if quant_mode == 0:
        wide = wide * 30 + 1
    else:
        wide = wide * scale[flat[order].long()].double()
        step = wide.abs().amax(1) / 127
        torch.testing.assert_close(steps.cpu().double(), step, rtol=1e-5, atol=0)
        wide = wide / step[:, None]
    assert ((rows.cpu().double() - wide.clamp(-128, 127)).abs() <= 0.501).all()


def test_init_routing_quant_drops_and_pads():
    x, experts = torch.randn(4, 16), torch.tensor([[0], [1], [0], [0]], dtype=torch.int32)
    rows, places, _, before, _ = torch_npu.npu_moe_init_routing_quant(
        x.npu(),
        experts.npu(),
        scale=torch.tensor([30.0]).npu(),
        offset=torch.tensor([0.0]).npu(),
        expert_capacity=2,
        expert_num=3,
        drop_pad_mode=1,
        expert_tokens_before_capacity_flag=True,
        quant_mode=0,
    )
    assert before.tolist() == [3, 1, 0]
    assert places.tolist() == [0, 2, 1, -1]
    assert (
        (rows[0].cpu().double() - (x[[0, 2]].double() * 30).clamp(-128, 127)).abs() <= 0.501
    ).all()
    assert not rows[2].any()


def routed(experts, first, last):
    """Positions in the flattened experts, in the order of those of [first, last)."""
    flat = experts.view(-1).tolist()
    return [i for expert in range(first, last) for i, mine in enumerate(flat) if mine == expert]


@pytest.mark.parametrize("quant_mode", [-1, 0, 1])
@pytest.mark.parametrize("counts", [0, 1, 2])
@pytest.mark.parametrize("scatter", [0, 1])
def test_init_routing_v2(scatter, counts, quant_mode):
    first, last, k = 2, 6, 3
    x, experts = torch.randn(10, 16), torch.randint(0, 8, (10, k), dtype=torch.int32)
    scale = {-1: torch.rand(10), 0: torch.tensor([30.0]), 1: torch.rand(last - first, 16) + 0.5}[
        quant_mode
    ]
    offset = torch.tensor([1.0]) if quant_mode == 0 else None
    rows, places, tokens, steps = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        experts.npu(),
        scale=scale.npu(),
        offset=None if offset is None else offset.npu(),
        active_num=30,
        expert_num=8,
        expert_tokens_num_type=counts,
        expert_tokens_num_flag=True,
        quant_mode=quant_mode,
        active_expert_range=[first, last],
        row_idx_type=scatter,
    )
    order = torch.tensor(routed(experts, first, last))
    present, expected = len(order), x[order // k]
    if scatter:
        assert torch.equal(places.cpu()[:present].long(), order)
    else:
        wanted = torch.full((30,), -1)
        wanted[order] = torch.arange(present)
        assert torch.equal(places.cpu().long(), wanted)
    per_expert = torch.bincount(experts.view(-1), minlength=8)[first:last]
    if counts == 2:
        pairs = [[first + i, n] for i, n in enumerate(per_expert.tolist()) if n]
        assert tokens.cpu()[: len(pairs)].tolist() == pairs
    else:
        assert torch.equal(tokens.cpu(), per_expert if counts else per_expert.cumsum(0))
    rows, steps = rows.cpu()[:present], steps.cpu()
    if quant_mode == -1:
        assert torch.equal(rows, expected)
        assert torch.equal(steps[:present], scale[order // k])
    elif quant_mode == 0:
        assert torch.equal(rows, (expected * 30 + 1).round().clamp(-128, 127).to(torch.int8))
    else:
        wide = expected.double() * scale[experts.view(-1)[order].long() - first].double()
        close(steps[:present], wide.abs().amax(-1) / 127)
        assert ((rows.double() - wide / (wide.abs().amax(-1) / 127)[:, None]).abs() <= 0.501).all()


def test_init_routing_v2_drops_and_pads():
    x, experts = (
        torch.randn(6, 8),
        torch.tensor([[0, 1], [0, 2], [0, 1], [2, 0], [1, 2], [0, 3]], dtype=torch.int32),
    )
    rows, places, tokens, _ = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        experts.npu(),
        expert_capacity=2,
        expert_num=4,
        drop_pad_mode=1,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, 4],
    )
    expected, wanted, used = torch.zeros(4, 2, 8), torch.full((12,), -1), [0] * 4
    for i, expert in enumerate(experts.view(-1).tolist()):
        if used[expert] < 2:
            expected[expert, used[expert]], wanted[i] = x[i // 2], expert * 2 + used[expert]
            used[expert] += 1
    assert torch.equal(rows.cpu(), expected)
    assert torch.equal(places.cpu().long(), wanted)
    assert tokens.cpu().tolist() == [5, 3, 3, 1]


def test_re_routing():
    counts = torch.tensor([[2, 0, 1], [1, 3, 1]])
    tokens, scales = torch.randn(8, 4).half(), torch.rand(8)
    rows, steps, places, totals = torch_npu.npu_moe_re_routing(
        tokens.npu(), counts.npu(), per_token_scales=scales.npu()
    )
    order = torch.tensor([0, 1, 3, 4, 5, 6, 2, 7])
    assert torch.equal(rows.cpu(), tokens[order])
    assert torch.equal(steps.cpu(), scales[order])
    assert torch.equal(places.cpu().long(), order)
    assert totals.cpu().tolist() == [3, 3, 2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_permute_and_unpermute_with_gradients(k, dtype):
    tokens, indices = torch.randn(7, 6).to(dtype), torch.randint(0, 4, (7, k))
    probs = torch.rand(7, k).to(dtype) if k > 1 else None
    order = indices.view(-1).argsort(stable=True)

    ours = tokens.npu().requires_grad_()
    weights = None if probs is None else probs.npu().requires_grad_()
    permuted, places = torch_npu.npu_moe_token_permute(ours, indices.npu())
    assert torch.equal(permuted.cpu(), tokens[order // k])
    assert torch.equal(places.cpu().long(), order.argsort())
    result = torch_npu.npu_moe_token_unpermute(permuted * 2, places, probs=weights)

    wide, wide_weights = (
        tokens.double().requires_grad_(),
        (torch.ones(7, 1) if probs is None else probs).double().requires_grad_(),
    )
    expected = 2 * wide * wide_weights.sum(-1, True)
    close(result.detach(), expected.detach(), ulps=8)
    cotangent = torch.randn(7, 6).to(dtype)
    result.backward(cotangent.npu())
    expected.backward(cotangent.double())
    close(ours.grad, wide.grad, ulps=16)
    if probs is not None:
        close(weights.grad, wide_weights.grad, ulps=32)


def test_permute_drops_what_exceeds_num_out_tokens():
    tokens, indices = torch.randn(4, 3), torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]])
    permuted, places = torch_npu.npu_moe_token_permute(
        tokens.npu(), indices.npu(), num_out_tokens=5
    )
    assert permuted.shape == (5, 3)
    order = indices.view(-1).argsort(stable=True)
    expected = torch.zeros(8, 3, dtype=torch.float64)
    expected[order[:5]] = tokens.double()[order[:5] // 2]
    close(
        torch_npu.npu_moe_token_unpermute(permuted, places, probs=torch.ones(4, 2).npu()),
        expected.view(4, 2, 3).sum(1),
    )


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_finalize_routing(mode):
    tokens, k, experts, columns = 4, 3, 5, 6
    rows = torch.randn(experts, 3, columns) if mode % 2 else torch.randn(tokens * k, columns)
    places = torch.randperm(15 if mode % 2 else 12)[:12].int()
    if mode % 2:
        # what is dropped reads no row
        places[places == 0], places[2], rows[0, 0] = 14, -1, torch.nan
    skip1, skip2, bias = (
        torch.randn(tokens, columns),
        torch.randn(tokens, columns),
        torch.randn(experts, columns),
    )
    scales, chosen = (
        torch.randn(tokens, k),
        torch.randint(0, experts, (tokens, k), dtype=torch.int32),
    )
    actual = torch_npu.npu_moe_finalize_routing(
        *(x.npu() for x in (rows, skip1, skip2, bias, scales, places, chosen)), drop_pad_mode=mode
    )
    expected = skip1.double() + skip2.double()
    for i in range(tokens):
        for j in range(k):
            place = places[j * tokens + i if mode < 2 else i * k + j].item()
            row = rows.view(-1, columns)[place].double() if place >= 0 else 0
            expected[i] += scales[i, j].double() * (row + bias[chosen[i, j]].double())
    close(actual, expected, ulps=16)


def test_a_row_of_several_copies():
    """As vllm-ascend gives all copies for other ranks' experts one row."""
    rows, weights = torch.randn(6, 4).half(), torch.rand(3, 2)
    places = torch.tensor([0, 5, 5, 1, 5, 5], dtype=torch.int32)
    actual = torch_npu.npu_moe_token_unpermute(rows.npu(), places.npu(), probs=weights.npu())
    close(actual, (rows.double()[places.long()].view(3, 2, 4) * weights.double()[..., None]).sum(1))


@pytest.mark.parametrize("padded", [False, True])
def test_permute_with_routing_map_and_gradients(padded):
    tokens, probs = torch.randn(5, 4), torch.rand(5, 3)
    routes = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], dtype=torch.bool)
    count = 6 if padded else 10
    ours, weights = tokens.npu().requires_grad_(), probs.npu().requires_grad_()
    rows, row_probs, _ = torch_npu.npu_moe_token_permute_with_routing_map(
        ours, routes.npu(), probs=weights, num_out_tokens=count, drop_and_pad=padded
    )
    pairs = [
        (e, t)
        for e in range(3)
        for t in torch.nonzero(routes[:, e]).view(-1).tolist()[: 2 if padded else None]
    ]
    expert, token = map(torch.tensor, zip(*pairs, strict=True))
    assert torch.equal(rows.detach().cpu(), tokens[token])
    assert torch.equal(row_probs.detach().cpu(), probs[token, expert])
    to_rows, to_probs = torch.randn(len(token), 4), torch.randn(len(token))
    torch.autograd.backward([rows, row_probs], [to_rows.npu(), to_probs.npu()])
    close(ours.grad, torch.zeros(5, 4, dtype=torch.float64).index_add(0, token, to_rows.double()))
    expected = torch.zeros(5, 3)
    expected[token, expert] = to_probs
    assert torch.equal(weights.grad.cpu(), expected)


def test_routing_on_ascend310p(run):
    code = """
import torch, torch_npu
torch_npu.npu.set_compile_mode(jit_compile=False)
x, experts = torch.randn(4, 8).half(), torch.tensor([[3, 0], [1, 3], [0, 2], [1, 0]], dtype=torch.int32)
rows, places, ends, _ = torch_npu.npu_moe_init_routing_v2(
    x.npu(),
    experts.npu(),
    active_num=8,
    expert_num=4,
    expert_tokens_num_type=0,
    expert_tokens_num_flag=True,
    active_expert_range=[0, 4],
)
order = experts.view(-1).argsort(stable=True)
assert torch.equal(rows.cpu(), x[order // 2])
assert torch.equal(places.cpu().long(), order.argsort())
assert ends.cpu().tolist() == [3, 5, 6, 8]
"""
    done = run("run", "--soc", "Ascend310P3", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    {
        "groups": (
            lambda x, i: torch_npu.npu_moe_gating_top_k(x, 1, k_group=1, group_count=4),
            "a group has 2 experts",
        ),
        "range": (
            lambda x, i: torch_npu.npu_moe_init_routing_v2(
                x, i, active_num=8, expert_num=4, active_expert_range=[2, 9]
            ),
            r"active_expert_range is \[2, 9\)",
        ),
        "index": (
            lambda x, i: torch_npu.npu_moe_token_unpermute(x, i.view(-1)[:4].long()),
            r"sorted_indices is Long \(DT_INT64\); allowed: Int",
        ),
        "scatter index": (
            lambda x, i: torch_npu.npu_moe_re_routing(x.half(), i + 1, idx_type=1),
            "idx_type is 1; allowed: 0",
        ),
        "cumulative counts": (
            lambda x, i: torch_npu.npu_moe_re_routing(x.half(), i + 1, expert_token_num_type=0),
            "expert_token_num_type is 0; allowed: 1",
        ),
        "wide tokens": (
            lambda x, i: torch_npu.npu_moe_re_routing(x.half().repeat(1, 2048), i),
            "dimension 1 of tokens is 16384; allowed: 1 to 16383",
        ),
        "dtype of weights": (
            lambda x, i: torch_npu.npu_moe_finalize_routing(
                x.bfloat16(),
                None,
                None,
                None,
                x[:2, :2],
                torch.arange(4, dtype=torch.int32).npu(),
                None,
                drop_pad_mode=2,
            ),
            r"scales is Float \(DT_FLOAT\) and expanded_permuted_rows is BFloat16 \(DT_BFLOAT16\)",
        ),
        "experts": (
            lambda x, i: torch_npu.npu_moe_init_routing_v2(
                x, i, active_num=8, expert_num=10241, active_expert_range=[0, 2]
            ),
            "expert_num is 10241; allowed: 1 to 10240",
        ),
        "capacity": (
            lambda x, i: torch_npu.npu_moe_init_routing_v2(
                x,
                i,
                expert_num=4,
                expert_capacity=4,
                drop_pad_mode=1,
                expert_tokens_num_type=1,
                active_expert_range=[0, 4],
            ),
            "expert_capacity is 4; allowed: 1 to 3",
        ),
    }.values(),
)
def test_limits_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.randn(4, 8, device="npu"), torch.zeros(4, 2, dtype=torch.int32, device="npu"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "npu_moe_token_unpermute(x, i - 1)",
            "sorted_indices has values from -1 to 2; allowed: 0 to 3",
        ),
        (
            "npu_moe_token_unpermute(x.requires_grad_(), i // 2).sum().backward()",
            "sorted_indices has the same index twice; each must be there once",
        ),
        (
            "npu_moe_finalize_routing(x, None, None, None, x[:2, :2], i - 1, None, 2)",
            "expanded_src_to_dst_row has values from -1 to 2; allowed: 0 to 3",
        ),
    ],
)
def test_rows_that_do_not_exist_are_refused(run, call, message):
    """In programs of their own, as the stream fails."""
    code = f"""
import torch, torch_npu
x, i = torch.randn(4, 8, device="npu"), torch.arange(4, dtype=torch.int32, device="npu")
torch_npu.{call}
torch.npu.synchronize()
"""
    done = run("run", "--", sys.executable, "-c", code)
    assert done.returncode
    assert message in done.stderr
