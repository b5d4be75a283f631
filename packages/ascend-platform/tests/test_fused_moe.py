# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Expert selection and a rank's experts, compared with float64 on the CPU."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ascend_platform.lora.experts import FusedMoEWithLoRA
from ascend_platform.ops.moe import experts as moe
from ascend_platform.ops.moe import grouped, router
from ascend_platform.overrides import guard
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router import (
    fused_topk_router,
    grouped_topk_router,
    zero_expert_router,
)

TOKENS, EXPERTS, HIDDEN, INNER = 33, 16, 64, 32
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
guard.install("common", "ops.moe.router")


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gated(dtype):
    """Tokens, and both matrices of experts with a gate."""
    w13, w2 = drawn(EXPERTS, 2 * INNER, HIDDEN, seed=1), drawn(EXPERTS, HIDDEN, INNER, seed=2)
    return drawn(TOKENS, HIDDEN).to(dtype), w13.to(dtype), (w2 / 8).to(dtype)


def chosen(logits, k, scoring, renormalize, bias=None, factor=1.0, groups=1, best_groups=1):
    """Weights of all experts, zero for those that are not selected."""
    logits = logits.double()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias.double()
    by_group = ranked.view(len(logits), groups, -1)
    of_group = by_group.amax(-1) if bias is None else by_group.topk(2, -1).values.sum(-1)
    allowed = torch.zeros_like(of_group).scatter_(1, of_group.topk(best_groups, -1).indices, 1)
    ranked = ranked.masked_fill(
        allowed.repeat_interleave(logits.shape[1] // groups, 1) == 0, -torch.inf
    )
    ids = ranked.topk(k, -1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(1, ids, weights * factor)


def spread(weights, ids, dtype=torch.float32):
    assert (weights.dtype, ids.dtype) == (dtype, torch.int32)
    return torch.zeros(len(ids), EXPERTS, dtype=torch.float64).scatter_(
        1, ids.cpu().long(), weights.cpu().double()
    )


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_topk(scoring, renormalize, dtype):
    logits = drawn(TOKENS, EXPERTS).to(dtype)
    x = torch.empty(TOKENS, HIDDEN, dtype=dtype, device="npu")
    weights, ids, _ = fused_topk_router.fused_topk(
        x, logits.npu(), 3, renormalize, scoring_func=scoring
    )
    # As transformers does, the operator rounds renormalized weights of a softmax to its dtype.
    rounded = dtype if renormalize and scoring == "softmax" else torch.float32
    torch.testing.assert_close(
        spread(weights, ids, rounded),
        chosen(logits, 3, scoring, renormalize),
        rtol=torch.finfo(rounded).eps if rounded == torch.bfloat16 else 1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_without_weights_are_identities(dtype):
    """LongCat routes over experts with weights and, after them, identities, whose share of the
    output the router computes.

    In a graph, where nothing may wait for the device.
    """
    logits, bias, real = drawn(TOKENS, EXPERTS), drawn(EXPERTS, seed=1) * 0.1, EXPERTS - 6
    x = drawn(TOKENS, HIDDEN, seed=2).to(dtype)
    router = zero_expert_router.ZeroExpertRouter(
        3, EXPERTS, bias.npu(), real, "identity", routed_scaling_factor=2.5
    )
    given, graph = (x.npu(), logits.npu(), torch.int32), torch.npu.NPUGraph()
    router._compute_routing(*given)
    with torch.npu.graph(graph):
        weights, ids = router._compute_routing(*given)
    graph.replay()
    expected = chosen(logits, 3, "softmax", False, bias, 2.5)
    assert (expected[:, real:] > 0).any()
    shares = expected[:, real:].sum(-1, keepdim=True)
    torch.testing.assert_close(
        router.zero_expert_output.cpu(), (x.double() * shares).to(dtype), rtol=1e-2, atol=1e-5
    )
    expected[:, real:] = 0
    kept = torch.zeros_like(expected).scatter_add_(1, ids.cpu().long(), weights.cpu().double())
    torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-6)
    assert all(len(set(each)) == 3 and max(each) < real for each in ids.tolist())


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_grouped_topk(scoring, renormalize, biased, groups, factor):
    logits, bias = drawn(TOKENS, EXPERTS), drawn(EXPERTS, seed=1) * 0.1 if biased else None
    weights, ids = grouped_topk_router.grouped_topk(
        torch.empty(TOKENS, HIDDEN, device="npu"),
        logits.npu(),
        3,
        renormalize,
        *groups,
        scoring,
        factor,
        None if bias is None else bias.npu(),
    )
    exact = chosen(logits, 3, scoring, renormalize, bias, factor, *groups)
    torch.testing.assert_close(spread(weights, ids), exact, rtol=1e-5, atol=1e-6)


def test_small_groups_fall_back_to_vllm():
    logits = drawn(TOKENS, EXPERTS)
    x = torch.empty(TOKENS, HIDDEN, device="npu")
    weights, ids = grouped_topk_router.grouped_topk(x, logits.npu(), 3, True, 8, 3)
    exact = chosen(logits, 3, "softmax", True, groups=8, best_groups=3)
    torch.testing.assert_close(spread(weights, ids), exact, rtol=1e-5, atol=1e-6)


def method(first, count):
    moe_method = moe.NPUFusedMoEMethod.__new__(moe.NPUFusedMoEMethod)
    parallel = SimpleNamespace(
        dp_size=1, pcp_size=1, is_sequence_parallel=False, use_ep=count < EXPERTS
    )
    moe_method.moe = SimpleNamespace(
        num_experts=EXPERTS,
        has_bias=False,
        moe_parallel_config=parallel,
        experts_per_token=3,
        swiglu_limit=None,
    )
    moe_method.first_expert, moe_method.num_local_experts = first, count
    return moe_method


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("first", "count", "tokens"),
    [(0, EXPERTS, TOKENS), (4, 8, TOKENS), (15, 1, TOKENS), (0, 1, 1), (8, 8, 1)],
)
@pytest.mark.parametrize(
    "activation", [MoEActivation.SILU, MoEActivation.GELU_TANH, MoEActivation.RELU2_NO_MUL]
)
def test_local_experts(activation, first, count, tokens, dtype):
    x, gated = drawn(tokens, HIDDEN).to(dtype), activation.is_gated
    w13 = (drawn(EXPERTS, (1 + gated) * INNER, HIDDEN, seed=1) / 8).to(dtype)
    w2 = (drawn(EXPERTS, HIDDEN, INNER, seed=2) / 8).to(dtype)
    ids = torch.stack(
        [
            torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i))[:3]
            for i in range(tokens)
        ]
    ).int()
    if tokens == 1:
        ids = torch.tensor([[3, 5, 7]], dtype=torch.int32)  # none is local
    weights = drawn(tokens, 3, seed=3).softmax(-1)
    expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for token, expert, weight in zip(
        range(tokens), ids.tolist(), weights.to(dtype).double(), strict=True
    ):
        for number, factor in zip(expert, weight, strict=True):
            if first <= number < first + count:
                inner = w13[number].double() @ x[token].double()
                if gated:
                    gate, up = inner.chunk(2)
                    tanh = activation == MoEActivation.GELU_TANH
                    inner = up * (F.gelu(gate, approximate="tanh") if tanh else F.silu(gate))
                else:
                    inner = inner.clamp(min=0) ** 2
                expected[token] += factor * (w2[number].double() @ inner)
    layer = SimpleNamespace(
        w13_weight=w13[first : first + count].npu(), w2_weight=w2[first : first + count].npu()
    )
    layer.activation = activation
    actual = method(first, count).forward_oot(layer, x.npu(), weights.npu(), ids.npu(), None, None)
    assert (actual.dtype, actual.shape) == (dtype, x.shape)
    bound = BOUNDS[dtype]
    # An output that cancels has the rounding errors of its terms, which are as large as others.
    least = bound * max(1, float(expected.abs().max()))
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=bound, atol=least)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_biases_and_clipped_swiglu(dtype):
    """gpt-oss's experts against float64: gate and up interleaved, clamped to 7, with biases."""
    x, w13, w2 = gated(dtype)
    b13, b2 = drawn(EXPERTS, 2 * INNER, seed=4).to(dtype), drawn(EXPERTS, HIDDEN, seed=5).to(dtype)
    ids = torch.stack(
        [
            torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i))[:3]
            for i in range(TOKENS)
        ]
    ).int()
    weights = drawn(TOKENS, 3, seed=3).softmax(-1)
    expected = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for number, factor in zip(
            ids[token].tolist(), weights[token].to(dtype).double(), strict=True
        ):
            both = w13[number].double() @ x[token].double() + b13[number].double()
            gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            expected[token] += factor * (w2[number].double() @ inner + b2[number].double())
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    layer = SimpleNamespace(
        w13_weight=w13.npu(),
        w2_weight=w2.npu(),
        w13_bias=b13.to(wide).npu(),
        w2_bias=b2.to(wide).npu(),
    )
    layer.activation = MoEActivation.SWIGLUOAI
    ours = method(0, EXPERTS)
    ours.moe.has_bias = True
    actual = ours.forward_oot(layer, x.npu(), weights.npu(), ids.npu(), None, None)
    bound = BOUNDS[dtype]
    assert (actual.cpu().double() - expected).norm() / expected.norm() < bound


@pytest.mark.parametrize(
    ("activation", "alpha", "bias"),
    [(MoEActivation.SILU, 1.0, 0.0), (MoEActivation.SWIGLUOAI_UNINTERLEAVE, 1.5, 0.75)],
    ids=["silu", "swigluoai"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_limit_of_swiglu(dtype, activation, alpha, bias):
    """EXAONE-MoE's, Ling 3's and MiniMax-M3's experts against float64: gate and up are clamped, as
    in vLLM."""
    x, w13, w2 = gated(dtype)
    ids = torch.arange(TOKENS).remainder(EXPERTS).int()[:, None]
    weights, ours = drawn(TOKENS, 1, seed=3).sigmoid(), method(0, EXPERTS)
    gate, up = (w13[ids[:, 0]].double() @ x.double()[..., None])[..., 0].chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    inner = gate * torch.sigmoid(alpha * gate) * (up + bias)
    expected = (w2[ids[:, 0]].double() @ inner[..., None])[..., 0] * weights.to(dtype).double()
    layer = SimpleNamespace(w13_weight=w13.npu(), w2_weight=w2.npu(), activation=activation)
    ours.moe.swiglu_limit, ours.moe.swiglu_alpha, ours.moe.swiglu_beta = 7.0, alpha, bias
    actual = ours.forward_oot(layer, x.npu(), weights.npu(), ids.npu(), None, None)
    bound = BOUNDS[dtype]
    assert (actual.cpu().double() - expected).norm() / expected.norm() < bound


def test_router_weights_of_inputs():
    """Llama 4: one expert for each token, whose input is multiplied by the router's weight."""
    x, ids = drawn(TOKENS, HIDDEN), torch.arange(TOKENS).remainder(EXPERTS).int()[:, None]
    w13, w2 = drawn(EXPERTS, 2 * INNER, HIDDEN, seed=1) / 8, drawn(EXPERTS, HIDDEN, INNER, seed=2)
    weights, ours = drawn(TOKENS, 1, seed=3).sigmoid(), method(0, EXPERTS)
    ours.moe.experts_per_token = 1
    layer = SimpleNamespace(
        w13_weight=w13.npu(),
        w2_weight=w2.npu(),
        activation=MoEActivation.SILU,
        apply_router_weight_on_input=True,
        expert_map=None,
    )
    ours.setup_experts(layer)
    gate, up = (w13[ids[:, 0]] @ (x * weights)[..., None])[..., 0].chunk(2, -1)
    expected = w2[ids[:, 0]] @ (torch.nn.functional.silu(gate) * up)[..., None]
    given = x.npu()
    actual = ours.forward_oot(layer, given, weights.npu(), ids.npu(), None, None)
    torch.testing.assert_close(actual.cpu(), expected[..., 0], atol=1e-4, rtol=1e-4)
    assert torch.equal(given.cpu(), x)  # Shared experts read it, too.


@pytest.mark.parametrize("dropped", [0, 2])
def test_router_weights_stay_float32(dropped):
    """Two experts cancel except for the last bits of a weight, which bfloat16 does not have, with
    and without dropped experts."""
    values, rows = [256.0, -256.0] + [torch.nan] * dropped, [0, 1] + [-1] * dropped
    expert_out = torch.tensor(values)[:, None].expand(-1, HIDDEN).contiguous().bfloat16().npu()
    weights = torch.tensor([[0.5 + 2**-10, 0.5] + [0.25] * dropped]).npu()
    actual = grouped.combine(
        expert_out, torch.tensor(rows, dtype=torch.int32).npu(), weights, has_dropped=bool(dropped)
    )
    # The dtype of the sum is the implementation's; with weights in bfloat16 it is 0.
    expected = torch.full((1, HIDDEN), 0.25, dtype=actual.dtype)
    torch.testing.assert_close(actual.cpu(), expected, rtol=2**-7, atol=0)


def test_unrouted_rows_are_not_read(monkeypatch):
    """Rows that the matmuls do not write may hold any values, on an NPU also NaN."""

    def experts(w13, w2, rows, counts, *unused):
        out = torch.full_like(rows, torch.nan)
        out[: int(counts.sum())] = rows[: int(counts.sum())]
        return out

    monkeypatch.setattr(moe, "run_experts", experts)
    layer = SimpleNamespace(w13_weight=None, w2_weight=None, activation=MoEActivation.SILU)
    x, ids = drawn(2, HIDDEN), torch.tensor([[1, 9], [2, 3]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.5], [0.5, 0.5]])
    for first, expected in ((8, torch.stack([x[0] * 0.5, x[1] * 0])), (12, x * 0)):
        actual = method(first, 4).forward_oot(layer, x.npu(), weights.npu(), ids.npu(), None, None)
        torch.testing.assert_close(actual.cpu(), expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation": MoEActivation.GELU}, "activation gelu"),
        (
            {"apply_router_weight_on_input": True},
            "router weights on the inputs of several experts of a token",
        ),
        ({"bias": True}, "biases"),
        ({"limit": 7.0}, "a limit of SwiGLU"),
    ],
)
def test_unsupported_experts_are_refused(monkeypatch, changes, named):
    monkeypatch.setattr(
        moe.UnquantizedFusedMoEMethod, "process_weights_after_loading", lambda self, layer: None
    )
    ours = method(0, EXPERTS)
    ours.moe.has_bias, ours.moe.swiglu_limit = changes.pop("bias", False), changes.pop("limit", 0)
    ours.takes_biases = False  # as of quantized experts
    plain = {
        "activation": MoEActivation.SILU,
        "apply_router_weight_on_input": False,
        "expert_map": None,
    }
    layer = SimpleNamespace(**plain | changes)
    with pytest.raises(ValueError, match=f"experts with {named} are not supported"):
        ours.process_weights_after_loading(layer)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("unpadded", [None, 5])
def test_eplb_map_to_physical(recorded, unpadded):
    """Compared with a loop: experts 0 and 2 have two replicas; the last two of seven tokens are
    padding."""
    places, copies = (
        torch.tensor([[0, 4, -1], [1, -1, -1], [2, 5, -1], [3, -1, -1]]),
        torch.tensor([2, 1, 2, 1]),
    )
    ids = torch.tensor([[0, 2], [0, 1], [2, 3], [3, 0], [0, 2], [2, 0], [1, 2]], dtype=torch.int32)
    load = torch.tensor([1, 0, 0, 0, 0, 0], dtype=torch.int32)
    expected, counts = [], load.tolist()
    for token, chosen in enumerate(ids.tolist()):
        expected.append([places[expert][token % copies[expert]].item() for expert in chosen])
        for place in expected[-1] if recorded and (unpadded is None or token < unpadded) else ():
            counts[place] += 1
    on_npu = load.npu()
    number = None if unpadded is None else torch.tensor(unpadded, dtype=torch.int32).npu()
    actual = router.eplb_map_to_physical(
        ids.npu(), on_npu, places.npu(), copies.npu(), torch.tensor(recorded).npu(), number
    )
    assert (actual.dtype, actual.tolist()) == (ids.dtype, expected)
    assert on_npu.tolist() == counts
    assert [expected[0], expected[5]] == [[0, 2], [5, 4]]  # the same experts, other replicas


def test_lora_on_experts_without_a_gate_is_refused():
    """As Nemotron-H has them."""
    config = SimpleNamespace(is_act_and_mul=False, tp_size=1, tp_rank=0, num_local_experts=2)
    layer = SimpleNamespace(
        moe_config=config, _shared_experts=None, weight=torch.zeros(1), local_num_experts=2
    )
    with pytest.raises(ValueError, match="LoRA on experts without a gate is not supported; fix: "):
        FusedMoEWithLoRA(layer)
