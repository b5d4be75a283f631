# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""LoRA layers, compared with each token times its adapter in float64."""

import types

import pytest
import torch
from ascend_platform.lora import punica
from vllm.lora.layers import LoRAMapping

SLOTS, RANK, IN = 3, 8, 32
IDS = [7, None, 9]  # of the adapters in the slots


def adapters(out, slices, seed=0):
    torch.manual_seed(seed)
    a = tuple(torch.randn(SLOTS, 1, RANK, IN, device="npu") for _ in range(slices))
    b = tuple(torch.randn(SLOTS, 1, width, RANK, device="npu") for width in out)
    return a, b


def wrapper(tokens, rows=()):
    config = types.SimpleNamespace(max_loras=SLOTS, lora_dtype=torch.float32)
    punica_wrapper = punica.NPUPunicaWrapper(64, 16, torch.device("npu"), lora_config=config)
    punica_wrapper.update_metadata(
        LoRAMapping(tuple(tokens), tuple(rows or tokens)), IDS, SLOTS, 100
    )
    return punica_wrapper


def slot(adapter):
    return IDS.index(adapter) if adapter else None


def expected(x, a, b, tokens):
    """[tokens, out] of one slice, in float64."""
    rows = []
    for row, adapter in zip(x.cpu().double(), tokens, strict=True):
        index = slot(adapter)
        rows.append(
            torch.zeros(b.shape[2]).double()
            if index is None
            else b[index, 0].cpu().double() @ (a[index, 0].cpu().double() @ row)
        )
    return torch.stack(rows)


MIXED = [7, 0, 9, 9, 0, 7, 7]


@pytest.mark.parametrize("out", [[16], [24, 8, 8]])
@pytest.mark.parametrize("tokens", [MIXED, [0, 0], [9]])
def test_linear(out, tokens):
    a, b = adapters(out, len(out))
    before = [weight.cpu() for weight in (*a, *b)]
    x, y = (
        torch.randn(len(tokens), IN, device="npu"),
        torch.randn(len(tokens), sum(out), device="npu"),
    )
    added = (
        torch.cat([expected(x, *pair, tokens) for pair in zip(a, b, strict=True)], 1)
        + y.cpu().double()
    )
    punica_wrapper = wrapper(tokens)
    # The second time the weights are already in the order of the first time.
    for _ in range(2):
        actual = y.clone()
        punica_wrapper.add_lora_linear(actual, x, a, b, 1.0, tuple(out))
        torch.testing.assert_close(actual.cpu().double(), added, rtol=1e-4, atol=1e-4)
    assert all(
        torch.equal(weight.cpu(), kept) for weight, kept in zip((*a, *b), before, strict=True)
    )


def test_slots_can_be_loaded_outside_of_inference_mode():
    """As ``add_lora`` does after graph capture."""
    a, b = adapters([24, 8, 8], 3)
    x, y = torch.randn(1, IN, device="npu"), torch.zeros(1, 40, device="npu")
    with torch.inference_mode():
        wrapper([7]).add_lora_linear(y.clone(), x, a, b, 1.0, (24, 8, 8))
    for weight in (*a, *b):
        weight[0] = 0
    with torch.inference_mode():
        wrapper([7]).add_lora_linear(y, x, a, b, 1.0, (24, 8, 8))
    assert not y.any()


def test_adapter_loaded_after_first_use():
    a, b = adapters([16], 1)
    x, punica_wrapper = torch.randn(7, IN, device="npu"), wrapper(MIXED)
    y = torch.zeros(7, 16, device="npu")
    punica_wrapper.add_lora_linear(y, x, a, b, 1.0, (16,))
    b[0][0, 0, :4].copy_(torch.ones(4, RANK))  # as vLLM's set_lora does
    y.zero_()
    punica_wrapper.add_lora_linear(y, x, a, b, 1.0, (16,))
    torch.testing.assert_close(
        y.cpu().double(), expected(x, a[0], b[0], MIXED), rtol=1e-4, atol=1e-4
    )


def test_separate_shrink_and_expand():
    a, b = adapters([24, 8], 2)
    x, punica_wrapper = torch.randn(7, IN, device="npu"), wrapper(MIXED)
    shrunk = torch.zeros(2, 7, RANK, device="npu")
    punica_wrapper.add_shrink(shrunk, x, a, 1.0)
    y = torch.zeros(7, 40, device="npu")
    punica_wrapper.add_expand(y, shrunk, b, (24, 8), offset_start=8)
    added = torch.cat([expected(x, *pair, MIXED) for pair in zip(a, b, strict=True)], 1)
    torch.testing.assert_close(y[:, 8:].cpu().double(), added, rtol=1e-4, atol=1e-4)
    assert not y[:, :8].any()


def test_embedding_and_logits():
    a, b = adapters([20], 1)
    punica_wrapper, x = wrapper(MIXED, rows=[9, 0, 7]), torch.randn(7, RANK, device="npu")
    y = torch.zeros(7, 20, device="npu")
    punica_wrapper.add_lora_embedding(y, x, b[0])
    rows = [
        torch.zeros(20) if slot(t) is None else b[0][slot(t), 0].cpu() @ row
        for t, row in zip(MIXED, x.cpu(), strict=True)
    ]
    torch.testing.assert_close(y.cpu(), torch.stack(rows), rtol=1e-4, atol=1e-4)
    hidden, logits = torch.randn(3, IN, device="npu"), torch.zeros(3, 18, device="npu")
    punica_wrapper.add_lora_logits(logits, hidden, a[0], b[0], 1.0)
    actual = expected(hidden, a[0], b[0], [9, 0, 7])[:, :18]
    torch.testing.assert_close(logits.cpu().double(), actual, rtol=1e-4, atol=1e-4)


def test_logits_of_prompts_have_the_adapters_of_their_tokens():
    """Of a slice of the hidden states, which has other rows than the sampled ones, and as many."""
    a, b = adapters([20], 1)
    tokens = [7, 7, 7, 9, 9, 9, 0, 0]
    punica_wrapper = wrapper(tokens, rows=[7, 9, 0])
    manager = types.SimpleNamespace(
        _adapter_manager=types.SimpleNamespace(punica_wrapper_mapping={"": punica_wrapper})
    )
    hidden = torch.randn(10, IN, device="npu")[1:9]

    def compute_logits(rows):
        logits = torch.zeros(len(rows), 18, device="npu")
        punica_wrapper.add_lora_logits(
            logits, rows * 1.0, a[0], b[0], 1.0
        )  # some models scale them
        return logits

    of_tokens = punica.of_tokens(manager, compute_logits, hidden)
    for part in (slice(0, 2), slice(2, 5), slice(3, 6), slice(6, 8)):
        actual = of_tokens(hidden[part])
        torch.testing.assert_close(
            actual.cpu().double(),
            expected(hidden[part], a[0], b[0], tokens[part])[:, :18],
            rtol=1e-4,
            atol=1e-4,
        )
    sampled = expected(hidden[:3], a[0], b[0], [7, 9, 0])[:, :18]
    torch.testing.assert_close(
        compute_logits(hidden[:3]).cpu().double(), sampled, rtol=1e-4, atol=1e-4
    )
