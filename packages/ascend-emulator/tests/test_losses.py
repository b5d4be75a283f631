# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Losses and their gradients, for each reduction."""

import re

import pytest
import torch
import torch_npu
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SHAPE = (6, 5)


def between(low, high, *shape):
    return low + (high - low) * torch.rand(shape)


# A function of input and target, and how both are made.
LOSSES = {
    "l1": (F.l1_loss, lambda: (torch.randn(SHAPE), torch.randn(SHAPE))),
    "mse": (F.mse_loss, lambda: (torch.randn(SHAPE), torch.randn(SHAPE))),
    "smooth_l1": (
        lambda x, y, **r: F.smooth_l1_loss(x, y, beta=0.5, **r),
        lambda: (torch.randn(SHAPE), torch.randn(SHAPE)),
    ),
    "bce": (
        lambda x, y, **r: F.binary_cross_entropy(x, y.detach(), **r),
        lambda: (between(0.1, 0.9, 6, 5), between(0, 1, 6, 5)),
    ),
    "bce, weighted": (
        lambda x, y, **r: F.binary_cross_entropy(x, y.detach(), y.detach() + 1, **r),
        lambda: (between(0.1, 0.9, 6, 5), between(0, 1, 6, 5)),
    ),
    "bce with logits": (
        lambda x, y, **r: F.binary_cross_entropy_with_logits(x, y.detach(), **r),
        lambda: (torch.randn(SHAPE), between(0, 1, 6, 5)),
    ),
    "bce with logits, weighted": (
        lambda x, y, **r: F.binary_cross_entropy_with_logits(
            x, y.detach(), y.detach() + 1, pos_weight=y[0].detach() * 3, **r
        ),
        lambda: (torch.randn(SHAPE), between(0, 1, 6, 5)),
    ),
    "kl_div": (
        F.kl_div,
        lambda: (torch.randn(SHAPE).log_softmax(-1), torch.randn(SHAPE).softmax(-1)),
    ),
    "kl_div of logarithms": (
        lambda x, y, **r: F.kl_div(x, y, log_target=True, **r),
        lambda: (torch.randn(SHAPE).log_softmax(-1), torch.randn(SHAPE).log_softmax(-1)),
    ),
    "soft_margin": (
        lambda x, y, **r: F.soft_margin_loss(x, y.detach(), **r),
        lambda: (torch.randn(SHAPE), torch.randint(0, 2, SHAPE) * 2 - 1),
    ),
    "nll": (F.nll_loss, lambda: (torch.randn(SHAPE).log_softmax(-1), torch.randint(0, 5, (6,)))),
    "nll, some ignored": (
        lambda x, y, **r: F.nll_loss(x, y, torch.arange(1, 6).to(x), ignore_index=2, **r),
        lambda: (torch.randn(SHAPE).log_softmax(-1), torch.tensor([0, 2, 4, 1, 2, 3])),
    ),
    "nll of planes": (
        F.nll_loss,
        lambda: (torch.randn(2, 5, 3, 4).log_softmax(1), torch.randint(0, 5, (2, 3, 4))),
    ),
    "cross_entropy": (F.cross_entropy, lambda: (torch.randn(SHAPE), torch.randint(0, 5, (6,)))),
    "cross_entropy, smoothed": (
        lambda x, y, **r: F.cross_entropy(x, y, label_smoothing=0.1, **r),
        lambda: (torch.randn(SHAPE), torch.randint(0, 5, (6,))),
    ),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss(agree_backward, name, reduction, dtype):
    function, values = LOSSES[name]
    args = (x.to(dtype) if x.is_floating_point() or name == "soft_margin" else x for x in values())
    agree_backward(lambda *a: function(*a, reduction=reduction), *args, ulps=64)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_multilabel_margin(agree, reduction):
    x, target = torch.randn(SHAPE), torch.tensor([[0, 3, -1, 1, 1], [4, -1, 0, 0, 0]] * 3)
    agree(lambda x, y: F.multilabel_margin_loss(x, y, reduction=reduction), x, target, ulps=16)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc(agree_backward, reduction):
    logits, targets = torch.randn(12, 3, 7), torch.randint(1, 7, (3, 4))
    lengths = [12, 10, 8], [4, 3, 2]
    agree_backward(
        lambda x, y: F.ctc_loss(x.log_softmax(-1), y, *lengths, reduction=reduction),
        logits,
        targets,
        ulps=256,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_fused_cross_entropy(reduction, dtype):
    """And its gradient, with the arguments that the documentation allows with one: weights and
    ignored labels, but not the mean."""
    x, target, weight = (
        torch.randn(SHAPE).to(dtype),
        torch.randint(0, 5, (6,)),
        torch.arange(1, 6) / 5,
    )
    plain = (
        {"reduction": reduction}
        if reduction == "mean"
        else {"reduction": reduction, "ignore_index": 2}
    )
    factors = weight if reduction != "mean" else None
    ours, exact = x.npu().requires_grad_(), x.double().requires_grad_()
    given = factors.npu() if factors is not None else None
    loss, shares, *unused = torch_npu.npu_cross_entropy_loss(ours, target.npu(), given, **plain)
    expected = F.cross_entropy(
        exact, target, factors.double() if factors is not None else None, **plain
    )
    bound = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        loss.detach().cpu().double(), expected.detach().view(loss.shape), rtol=bound, atol=bound
    )
    torch.testing.assert_close(
        shares.detach().cpu().double(), x.double().log_softmax(1), rtol=bound, atol=bound
    )
    assert [each.numel() for each in unused] == [0, 0]
    slope = torch.randn(loss.shape).to(dtype)
    loss.backward(slope.npu())
    expected.backward(slope.double().view(expected.shape))
    torch.testing.assert_close(ours.grad.cpu().double(), exact.grad, rtol=bound, atol=bound)


def test_fused_cross_entropy_with_smoothing():
    x, target, weight = torch.randn(SHAPE), torch.randint(0, 5, (6,)), torch.arange(1, 6) / 5
    more = {"label_smoothing": 0.1, "ignore_index": 1}
    loss = torch_npu.npu_cross_entropy_loss(x.npu(), target.npu(), weight.npu(), **more)[0]
    torch.testing.assert_close(loss.cpu().view(()), F.cross_entropy(x, target, weight, **more))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"lse_square_scale_for_zloss": 0.1},
            "lse_square_scale_for_zloss is 0.1; only 0 is supported",
        ),
        ({"return_zloss": True}, "return_zloss is 1; allowed: 0"),
        ({"ignore_index": 5}, "ignore_index is 5; it must be below 5, the classes"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1; allowed: from 0, below 1"),
    ],
)
def test_fused_cross_entropy_refuses(arguments, message):
    x, target = (
        torch.randn(SHAPE, requires_grad=True, device="npu"),
        torch.zeros(6, dtype=torch.long, device="npu"),
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch_npu.npu_cross_entropy_loss(x, target, **arguments)
    for more in ({"ignore_index": 2}, {"label_smoothing": 0.1}):
        loss = torch_npu.npu_cross_entropy_loss(x, target, **more)[0]
        with pytest.raises(RuntimeError, match=r"only (their defaults|0) (are|is) supported"):
            loss.backward()
