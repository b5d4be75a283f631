# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Versions of fused operators that the installed torch_npu does not call, against those that it
calls or the formula."""

import functools
import sys

import comparisons
import pytest
import torch
import torch_npu

close = functools.partial(comparisons.close, ulps=8)


def npu(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, device="npu")


def integers(*shape):
    return torch.randint(-90, 90, shape, dtype=torch.int8)


def attention(query, key, value, heads=4, groups=2, layout="BNSD", mode=0):
    """Arguments of the version before ropes: 24 to value_antiquant_offset and prefixes, then the
    numbers."""
    out, lse = torch.zeros_like(query), npu(0)
    return (
        query,
        [key],
        [value],
        *[None] * 21,
        heads,
        0.2,
        2**31 - 1,
        2**31 - 1,
        layout,
        groups,
        mode,
        0,
        0,
        0,
        False,
        0,
        0,
        out,
        lse,
    )


def test_fused_inference_attention(calls):
    query, key, value = (
        torch.randn(shape).half().npu() for shape in ((2, 4, 6, 32), (2, 2, 9, 32), (2, 2, 9, 32))
    )
    given = attention(query, key, value)
    calls.compute("FusedInferAttentionScoreV2", *given)
    expected, _ = torch_npu.npu_fused_infer_attention_score(
        query, key, value, num_heads=4, num_key_value_heads=2, scale=0.2, input_layout="BNSD"
    )
    assert torch.equal(given[-2], expected)
    assert "4 heads over 3 key-value heads" in calls.refusal(
        "FusedInferAttentionScoreV2", *attention(query, key, value, groups=3)
    )


def test_grouped_product(calls):
    x, weight = torch.randn(7, 16).half().npu(), torch.randn(3, 16, 8).half().npu()
    ends, out = torch.tensor([2, 2, 7]).npu(), npu(7, 8, dtype=torch.half)
    before, after = [x], [out]
    rest = (*[None] * 6, ends, None, None, None, 3, 0, 0)
    calls.compute("GroupedMatmulV4", before, [weight], *rest, 0, after, None, None)
    (expected,) = torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=ends, split_item=3, group_type=0
    )
    assert torch.equal(out, expected)
    refusal = calls.refusal("GroupedMatmulV4", before, [weight], *rest, 1, after, None, None)
    assert refusal.startswith("per_token_scale is needed (rule grouped_matmul.activation-per-token")


def test_grouped_product_and_routing(calls):
    x, weight, scale = (
        integers(8, 32).npu(),
        integers(3, 32, 256).npu(),
        (torch.rand(3, 256) / 100).npu(),
    )
    rows, logit, shared = (
        torch.rand(8).npu(),
        torch.rand(8).npu(),
        torch.randn(2, 256).bfloat16().npu(),
    )
    counts, places, out = torch.tensor([2, 1, 5]).npu(), (torch.randperm(8) // 2).npu(), npu(4, 256)
    expected = torch_npu.npu_grouped_matmul_finalize_routing(
        x, weight, counts, scale=scale, pertoken_scale=rows, shared_input=shared, logit=logit, row_index=places,
        dtype=torch.float32, shared_input_weight=0.5, shared_input_offset=1, output_bs=4, group_list_type=1,
    )  # fmt: skip
    for name, unused in (("V2", 3), ("WeightNz", 0)):
        given = lambda kind, more=unused: (  # noqa: E731
            x, weight, scale, None, *[None] * more, rows, counts, shared, logit, places, 0, 0.5, 1, False, False, kind, out
        )  # fmt: skip
        out.zero_()
        calls.compute(f"GroupedMatmulFinalizeRouting{name}", *given(1))
        assert torch.equal(out, expected)
        assert "group_list_type is 3; allowed: 0 to 2" in calls.refusal(
            f"GroupedMatmulFinalizeRouting{name}", *given(3)
        )


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16], ids=str)
def test_grouped_products_are_added(calls, dtype):
    """The gradients of experts' weights, in Python and as counts (Ascend950)."""
    x, weight, start, counts = (
        torch.randn(9, 6).to(dtype),
        torch.randn(9, 4).to(dtype),
        torch.randn(3, 6, 4),
        [4, 0, 5],
    )
    ends = torch.tensor(counts).cumsum(0)
    parts = zip(x.double().split(counts), weight.double().split(counts), strict=True)
    expected = start.double() + torch.stack([a.T @ b for a, b in parts])
    ours = start.npu().view(18, 4)
    torch_npu.npu_grouped_matmul_add_(ours, x.npu(), weight.npu(), ends.npu())
    close(ours.view(3, 6, 4), expected, ulps=64)
    for name, more, lists in (
        ("GroupedMatmulAdd", (), ends),
        ("GroupedMatmulAddV2", (1,), torch.tensor(counts)),
    ):
        out = start.npu()
        calls.compute(name, x.npu(), weight.npu(), lists.npu(), out, True, False, 2, *more)
        close(out, expected, ulps=64)
        message = calls.refusal(
            name, x.npu(), weight.npu(), lists.npu(), out, False, False, 2, *more
        )
        assert message == "transpose_x is 0 and transpose_weight 0; only true and false are allowed"
        assert "group_type is 0; allowed: 2" in calls.refusal(
            name, x.npu(), weight.npu(), lists.npu(), out, True, False, 0, *more
        )


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_finalize_routing(calls, mode):
    tokens, k, columns = 4, 3, 6
    rows = (torch.randn(5, 3, columns) if mode % 2 else torch.randn(tokens * k, columns)).npu()
    places = torch.randperm(12).int().npu()
    skip1, skip2, bias = (
        torch.randn(shape).npu() for shape in ((tokens, columns), (tokens, columns), (5, columns))
    )
    scales, chosen = (
        torch.randn(tokens, k).npu(),
        torch.randint(0, 5, (tokens, k), dtype=torch.int32).npu(),
    )
    newest = lambda first, second: torch_npu.npu_moe_finalize_routing(  # noqa: E731
        rows, first, second, bias, scales, places, chosen, drop_pad_mode=mode
    )
    out = npu(tokens, columns)
    calls.compute(
        "MoeFinalizeRoutingV2", rows, places, skip1, skip2, bias, scales, chosen, mode, out
    )
    assert torch.equal(out, newest(skip1, skip2))
    message = calls.refusal(
        "MoeFinalizeRoutingV2", rows, places, skip1, None, bias, scales, chosen, mode, out
    )
    assert message == "skip1 is given without skip2"
    if mode:
        return
    calls.compute("MoeFinalizeRouting", rows, skip1, None, bias, scales, places, chosen, out)
    assert torch.equal(out, newest(None, skip1))
    assert "export_for_source_row is needed" in calls.refusal(
        "MoeFinalizeRouting", rows, skip1, None, bias, scales, places, None, out
    )


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "probs"])
@pytest.mark.parametrize("padded", [False, True], ids=["every choice", "capacity"])
def test_unpermutation_with_a_routing_map(padded, weighted):
    """And its gradients, against autograd in float64."""
    tokens, experts, k, capacity = 6, 4, 2, 3
    routes = torch.zeros(tokens, experts, dtype=torch.bool)
    for token in range(tokens):
        routes[token, torch.randperm(experts)[:k]] = True
    if padded:
        index = (
            routes.T.byte().argsort(dim=-1, descending=True, stable=True)[:, :capacity].reshape(-1)
        )
        row, token, expert = (
            torch.arange(len(index)),
            index,
            torch.arange(experts).repeat_interleave(capacity),
        )
    else:
        expert, token = routes.T.nonzero(as_tuple=True)
        index = token.argsort(stable=True)
        row, token = index, token[index]
        expert = expert[index]
    permuted, probs = torch.randn(len(index), 5), torch.randn(tokens, experts)
    ours, weights = permuted.npu().requires_grad_(), probs.npu().requires_grad_()
    exact, exact_weights = permuted.double().requires_grad_(), probs.double().requires_grad_()
    rows = exact[row] * exact_weights[token, expert].unsqueeze(1) if weighted else exact[row]
    expected = torch.zeros(tokens, 5, dtype=torch.float64).index_add(0, token, rows)
    given = (index.int().npu(), [tokens, 5])
    more = {
        "routing_map": routes.npu(),
        "drop_and_pad": padded,
        "probs": weights if weighted else None,
    }
    out = torch_npu.npu_moe_token_unpermute_with_routing_map(ours, *given, **more)
    close(out, expected.detach())
    slope = torch.randn(tokens, 5)
    out.backward(slope.npu())
    expected.backward(slope.double())
    close(ours.grad, exact.grad)
    if weighted:
        close(weights.grad, exact_weights.grad, ulps=32)
        shares = torch_npu._npu_moe_token_unpermute_with_routing_map(ours.detach(), *given, **more)[
            3
        ]
        assert torch.equal(shares.cpu(), probs[token, expert])
    with pytest.raises(RuntimeError, match=r"restore_shape is \[6, 4\]; it must be \[6, 5\]"):
        torch_npu._npu_moe_token_unpermute_with_routing_map(ours.detach(), given[0], [6, 4], **more)


def test_gradient_of_unpermutation_needs_its_rows(calls):
    routes = torch.ones(2, 2, dtype=torch.bool).npu()
    grad, index, out = npu(2, 3), torch.arange(4).int().npu(), npu(4, 3)
    given = (grad, index, index, routes, None, npu(2, 2), False, [2, 3], out, npu(2, 2))
    assert (
        calls.refusal("MoeTokenUnpermuteWithRoutingMapGrad", *given)
        == "permuted_tokens is needed with probs"
    )


def test_weights_to_dequantize(calls):
    x, weight, scale = torch.randn(2, 64).half(), integers(64, 48), torch.rand(48).half() / 50
    out = npu(2, 48, dtype=torch.half)
    calls.compute(
        "WeightQuantBatchMatmulNz",
        x.npu(),
        weight.npu(),
        scale.npu(),
        None,
        None,
        None,
        None,
        0,
        out,
    )
    close(out, x.double() @ (weight.double() * scale.double()))
    message = calls.refusal(
        "WeightQuantBatchMatmulNz",
        x.float().npu(),
        weight.npu(),
        scale.npu(),
        None,
        None,
        None,
        None,
        0,
        out,
    )
    assert message.startswith("x is Float (DT_FLOAT); allowed: Half, BFloat16 (rule ")


ASCEND950 = """
import torch, torch_npu
assert torch.npu.get_device_name().startswith("Ascend950")
x, index = torch.randn(4, 6), torch.tensor([0, 2])
def same(name, ours, expected, **bounds):
    torch.testing.assert_close(ours.cpu(), expected, **bounds, msg=lambda text: name + ": " + text)
same("index_fill", x.npu().index_fill(0, index.npu(), 2.0), x.index_fill(0, index, 2.0))
same("index_fill_", x.npu().index_fill_(1, index.npu(), 2.0), x.index_fill(1, index, 2.0))
same("bucketize", torch.bucketize(x.npu(), torch.arange(-2.0, 3).npu()), torch.bucketize(x, torch.arange(-2.0, 3)))
assert x.npu().random_().max() > 2**20
rows = torch.ones(64, 64).npu()
out, mask = torch_npu._npu_dropout(rows, 0.25)
assert mask.numel() == 512 and abs((out == 0).float().mean().item() - 0.25) < 0.05
same("dropout", out[out != 0], torch.full(((out != 0).sum(),), 4 / 3))
same("transpose", torch_npu.npu_confusion_transpose(x.npu(), (1, 0), (3, 8), True), x.T.reshape(3, 8))
same("reshape", torch_npu.npu_confusion_transpose(x.npu(), (1, 0), (3, 8), False), x.reshape(3, 8).T)
same("indexing", torch_npu.npu_indexing(x.npu(), [1, 0], [4, -1], [2, 3], begin_mask=2), x[1:4:2, :-1:3])
boxes = torch.tensor([[0, 0, 10, 10], [10, 10, 20, 20.0]])
same("iou", torch_npu.npu_iou(boxes.npu(), boxes[:1].npu()), torch.tensor([[1.0, 1e-6]]), atol=1e-4, rtol=0)
images = torch.randn(1, 2, 6, 6)
pooled = torch.nn.functional.max_pool2d
same("max_pool2d", pooled(images.npu(), 3, 2, 1), pooled(images, 3, 2, 1))
weight, scale = torch.randint(-8, 8, (64, 48), dtype=torch.int8), torch.rand(48).half()
inner = torch.randn(2, 64).half()
torch.npu.config.allow_internal_format = True
cast = torch_npu.npu_format_cast(weight.npu(), 29)
assert torch_npu.get_npu_format(cast) == 29
product = torch_npu.npu_weight_quant_batchmatmul(inner.npu(), cast, scale.npu())
same("product", product.float(), inner.float() @ (weight.float() * scale.float()), atol=0.1, rtol=1e-3)
adam = [torch.zeros(5).npu() for _ in range(3)]
torch_npu.npu_apply_adam(0.9, 0.99, 0.1, 0.9, 0.99, 1e-8, torch.ones(5).npu(), False, False, out=adam)
same("adam", adam[0], torch.full((5,), -0.1), rtol=1e-4, atol=0)
print("all")
"""


def test_what_torch_npu_calls_on_ascend950(run):
    done = run("run", "--soc", "Ascend950PR_9599", "--", sys.executable, "-c", ASCEND950)
    assert done.stdout.endswith("all\n"), done.stderr[-2000:]
