"""Fused optimizers against the same in float64, step by step."""

import pytest
import torch


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "betas": (0.8, 0.95)}, {"amsgrad": True}, {"maximize": True}], ids=str
)
def test_fused_adamw(options):
    start = torch.randn(5, 7)
    ours = torch.nn.Parameter(start.npu())
    exact = torch.nn.Parameter(start.double())
    fused, plain = (torch.optim.AdamW([ours], lr=0.01, fused=True, **options), torch.optim.AdamW([exact], lr=0.01, **options))
    for _ in range(4):
        gradient = torch.randn(5, 7)
        ours.grad, exact.grad = gradient.npu(), gradient.double()
        fused.step()
        plain.step()
    torch.testing.assert_close(ours.detach().cpu().double(), exact.detach(), rtol=1e-5, atol=1e-6)
