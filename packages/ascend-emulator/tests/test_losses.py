"""Losses and their gradients, for each reduction."""

import pytest
import torch
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SHAPE = (6, 5)


def between(low, high, *shape):
    return low + (high - low) * torch.rand(shape)


# A function of input and target, and how both are made.
LOSSES = {
    "l1": (F.l1_loss, lambda: (torch.randn(SHAPE), torch.randn(SHAPE))),
    "mse": (F.mse_loss, lambda: (torch.randn(SHAPE), torch.randn(SHAPE))),
    "smooth_l1": (lambda x, y, **r: F.smooth_l1_loss(x, y, beta=0.5, **r), lambda: (torch.randn(SHAPE), torch.randn(SHAPE))),
    "bce": (lambda x, y, **r: F.binary_cross_entropy(x, y.detach(), **r), lambda: (between(0.1, 0.9, 6, 5), between(0, 1, 6, 5))),
    "bce, weighted": (
        lambda x, y, **r: F.binary_cross_entropy(x, y.detach(), y.detach() + 1, **r),
        lambda: (between(0.1, 0.9, 6, 5), between(0, 1, 6, 5)),
    ),
    "bce with logits": (
        lambda x, y, **r: F.binary_cross_entropy_with_logits(x, y.detach(), **r),
        lambda: (torch.randn(SHAPE), between(0, 1, 6, 5)),
    ),
    "bce with logits, weighted": (
        lambda x, y, **r: F.binary_cross_entropy_with_logits(x, y.detach(), y.detach() + 1, pos_weight=y[0].detach() * 3, **r),
        lambda: (torch.randn(SHAPE), between(0, 1, 6, 5)),
    ),
    "kl_div": (F.kl_div, lambda: (torch.randn(SHAPE).log_softmax(-1), torch.randn(SHAPE).softmax(-1))),
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
    "nll of planes": (F.nll_loss, lambda: (torch.randn(2, 5, 3, 4).log_softmax(1), torch.randint(0, 5, (2, 3, 4)))),
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
    agree_backward(lambda x, y: F.ctc_loss(x.log_softmax(-1), y, *lengths, reduction=reduction), logits, targets, ulps=256)
