# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fused optimizers against the same in float64, step by step."""

import pytest
import torch


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1, "betas": (0.8, 0.95)}, {"amsgrad": True}, {"maximize": True}],
    ids=str,
)
def test_fused_adamw(options):
    start = torch.randn(5, 7)
    ours = torch.nn.Parameter(start.npu())
    exact = torch.nn.Parameter(start.double())
    fused, plain = (
        torch.optim.AdamW([ours], lr=0.01, fused=True, **options),
        torch.optim.AdamW([exact], lr=0.01, **options),
    )
    for _ in range(4):
        gradient = torch.randn(5, 7)
        ours.grad, exact.grad = gradient.npu(), gradient.double()
        fused.step()
        plain.step()
    torch.testing.assert_close(ours.detach().cpu().double(), exact.detach(), rtol=1e-5, atol=1e-6)


def states(count, shape=(5, 7)):
    return [torch.rand(shape) for _ in range(count)]


def numbers(*values):
    return [torch.tensor([value]).npu() for value in values]


@pytest.mark.parametrize("maximize", [False, True], ids=["down", "up"])
def test_adamw_with_numbers_in_tensors(calls, maximize):
    """Two steps of the version whose powers of beta1 and beta2 are those before the step."""
    weight, first, second = states(3)
    ours, exact = (
        [each.npu() for each in (weight, first, second)],
        [each.double() for each in (weight, first, second)],
    )
    for step in range(2):
        gradient = torch.randn(5, 7)
        given = numbers(0.8**step, 0.95**step, 0.01, 0.1, 0.8, 0.95, 1e-8)
        calls.compute("ApplyAdamW", *ours, *given, gradient.npu(), None, False, maximize)
        slope = -gradient.double() if maximize else gradient.double()
        exact[1], exact[2] = exact[1] * 0.8 + 0.2 * slope, exact[2] * 0.95 + 0.05 * slope**2
        scale = (exact[2] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
        exact[0] = exact[0] * (1 - 0.001) - 0.01 * exact[1] / (1 - 0.8 ** (step + 1)) / scale
        for actual, expected in zip(ours, exact, strict=True):
            torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    assert "amsgrad is true; only false" in calls.refusal(
        "ApplyAdamW", *ours, *given, ours[0], ours[0], True, maximize
    )
    given[2] = torch.ones(2).npu()
    assert (
        calls.refusal("ApplyAdamW", *ours, *given, ours[0], None, False, maximize)
        == "lr has 2 elements; it must have 1"
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_adam(calls, nesterov):
    weight, first, second, gradient = states(4)
    ours, given = (
        [each.npu() for each in (weight, first, second)],
        numbers(0.81, 0.9025, 0.01, 0.9, 0.95, 1e-6),
    )
    calls.compute("ApplyAdam", *ours, *given, gradient.npu(), False, nesterov)
    w, m, v, g = (each.double() for each in (weight, first, second, gradient))
    m, v = m + (1 - 0.9) * (g - m), v + (1 - 0.95) * (g * g - v)
    rate = 0.01 * (1 - 0.9025) ** 0.5 / (1 - 0.81)
    w = w - rate * (m * 0.9 + 0.1 * g if nesterov else m) / (1e-6 + v.sqrt())
    for actual, expected in zip(ours, (w, m, v), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    message = calls.refusal("ApplyAdam", *ours, *given, torch.ones(3).npu(), False, nesterov)
    assert message.startswith("grad has shape [3]; it must be [5, 7] (rule apply_adam.shapes")


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": True}, {"maximize": True, "weight_decay": 0.1}, {"dampening": 0.2}],
    ids=str,
)
def test_fused_sgd(calls, options):
    """Three steps of two parameters against torch.optim.SGD; the gradients of the last
    are scaled."""
    starts = [torch.randn(5, 7), torch.randn(3)]
    exact = [torch.nn.Parameter(each.double()) for each in starts]
    plain = torch.optim.SGD(exact, lr=0.1, momentum=0.9, **options)
    ours, momenta = (
        [each.npu() for each in starts],
        [torch.zeros_like(each).npu() for each in starts],
    )
    for step in range(3):
        gradients, scale = [torch.randn(each.shape) for each in starts], 4.0 if step == 2 else 1.0
        for parameter, gradient in zip(exact, gradients, strict=True):
            parameter.grad = gradient.double()
        plain.step()
        given = [(each * scale).npu() for each in gradients]
        lead = (options.get("weight_decay", 0.0), 0.9, 0.1, options.get("dampening", 0.0))
        flags = (options.get("nesterov", False), options.get("maximize", False))
        factor = torch.tensor([scale]).npu() if step == 2 else None
        calls.compute("FusedSgd", ours, given, momenta, factor, *lead, *flags, step == 0)
        torch.testing.assert_close(given[0].cpu(), gradients[0])
    for actual, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert (
        calls.refusal("FusedSgd", ours, given, momenta[:1], None, *lead, *flags, False)
        == "params has 2 tensors, grads 2 and momentum_buffer_list 1"
    )
    assert "momentum is 0" in calls.refusal(
        "FusedSgd", ours, given, momenta, None, 0.0, 0.0, 0.1, 0.0, *flags, False
    )
