# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Gating of experts, against float64."""

import pytest
import torch
import torch_npu
from cann_calls import needs_argument
from comparisons import close

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def scores_of(shape):
    """Logits of which no two in a row are near each other, so that the order is the same in any
    precision."""
    return (
        torch.stack([torch.randperm(shape[-1]) for _ in range(shape[:-1].numel())]).view(shape)
        * 0.25
        - 1
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("renorm", [None, 0, 1])
def test_gating_by_softmax(renorm, dtype):
    x, finished = scores_of(torch.Size((6, 16))).to(dtype), torch.tensor([False, True] * 3)
    if renorm is None:
        y, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(x.npu(), finished.npu(), k=3)
        assert torch.equal(rows.cpu(), torch.arange(18, dtype=torch.int32).view(3, 6).T)
    else:
        y, experts, probabilities = torch_npu.npu_moe_gating_top_k_softmax_v2(
            x.npu(), k=3, finished=finished.npu(), renorm=renorm, output_softmax=True
        )
        if renorm == 0:
            close(probabilities, x.double().softmax(-1))
    chosen = x.double().topk(3, -1)
    close(
        y,
        chosen.values.softmax(-1) if renorm else x.double().softmax(-1).gather(-1, chosen.indices),
    )
    assert torch.equal(experts.cpu().long(), chosen.indices.masked_fill(finished[:, None], 16))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(
    ("k_group", "groups", "mode"), [(1, 1, 0), (2, 4, 0), (2, 4, 1), (4, 4, 1)]
)
def test_gating_in_groups(k_group, groups, mode, kind, dtype):
    x = scores_of(torch.Size((5, 32))).to(dtype) * 0.25
    bias = (torch.randperm(32) * 0.5).to(dtype)
    y, experts, normed = torch_npu.npu_moe_gating_top_k(
        x.npu(),
        4,
        bias=bias.npu(),
        k_group=k_group,
        group_count=groups,
        group_select_mode=mode,
        norm_type=kind,
        out_flag=True,
        routed_scaling_factor=2.5,
    )
    scores = x.double().sigmoid() if kind else x.double().softmax(-1)
    close(normed, scores)
    biased = (scores + bias.double()).view(5, groups, -1)
    of_group = biased.amax(-1) if mode == 0 else biased.topk(2, -1).values.sum(-1)
    kept = torch.zeros(5, groups, dtype=torch.bool).scatter(
        1, of_group.topk(k_group, -1).indices, True
    )
    expected = biased.masked_fill(~kept[..., None], -torch.inf).view(5, -1).topk(4, -1).indices
    weights = scores.gather(1, expected)
    assert torch.equal(experts.cpu().long(), expected)
    close(y, 2.5 * (weights / weights.sum(-1, True) if kind else weights))


def test_gating_chooses_the_first_of_equal_experts():
    x = torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0, 1.0]]).repeat(3, 1)
    _, experts, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(x.npu(), k=4, renorm=1)
    assert experts.cpu().tolist() == [[1, 3, 0, 2]] * 3


def test_gating_equals_the_router_of_deepseek_v3():
    """transformers' DeepseekV3TopkRouter, for the published model's 256 experts."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Config,
        DeepseekV3TopkRouter,
    )

    router = DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=64)).requires_grad_(False)
    assert (router.num_group, router.topk_group, router.top_k) == (8, 4, 8)
    router.weight.normal_(std=0.1)
    router.e_score_correction_bias.normal_(std=0.1)
    logits, weights, chosen = router(torch.randn(200, 64))
    y, experts, _ = torch_npu.npu_moe_gating_top_k(
        logits.npu(),
        router.top_k,
        bias=router.e_score_correction_bias.npu(),
        k_group=router.topk_group,
        group_count=router.num_group,
        group_select_mode=1,
        norm_type=1,
        renorm=0,
        routed_scaling_factor=router.routed_scaling_factor,
    )
    ours, theirs = experts.cpu().long().sort(-1), chosen.sort(-1)
    assert torch.equal(ours.values, theirs.values)
    close(y.cpu().gather(1, ours.indices), weights.double().gather(1, theirs.indices))


@needs_argument("npu_moe_gating_top_k", "input_ids")
def test_gating_by_token_id():
    x, ids, table = (
        torch.randn(3, 8),
        torch.tensor([2, 0, 1]),
        torch.tensor([[0, 1], [5, 2], [7, 3]]),
    )
    y, experts, _ = torch_npu.npu_moe_gating_top_k(
        x.npu(), 2, input_ids=ids.npu(), tid2eid=table.npu(), norm_type=1
    )
    weights = x.double().sigmoid().gather(1, table[ids])
    assert torch.equal(experts.cpu().long(), table[ids])
    close(y, weights / weights.sum(-1, True))


def test_gradient_of_gating():
    x = scores_of(torch.Size((4, 8))).double().requires_grad_()
    experts = x.topk(3, -1).indices
    normed = x.sigmoid()
    chosen = normed.gather(1, experts)
    grad = torch.randn(4, 3)
    (2 * chosen / chosen.sum(-1, True)).backward(grad.double())
    actual = torch_npu.npu_moe_gating_top_k_backward(
        normed.detach().float().npu(),
        grad.npu(),
        experts.int().npu(),
        norm_type=1,
        routed_scaling_factor=2.0,
    )
    close(actual, x.grad, ulps=16)
