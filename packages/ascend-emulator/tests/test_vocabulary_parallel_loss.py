# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Cross entropy of a vocabulary that is split over ranks, against torch.nn.functional.cross_entropy
in float64."""

import numpy as np
import pytest
import torch
import torch_npu
from cann_calls import Calls

ROWS, WIDTH, RANKS, EACH = 13, 48, 2, 128


def tokens(dtype=torch.int32):
    return torch.randint(0, RANKS * EACH, (ROWS,)).to(dtype)


@pytest.mark.parametrize("keep", [True, False], ids=["logits kept", "logits recomputed"])
@pytest.mark.parametrize(
    ("dtype", "index"), [(torch.float16, torch.int32), (torch.bfloat16, torch.int64)], ids=str
)
def test_loss_and_gradients_of_two_ranks(dtype, index, keep):
    """As Megatron uses it: what the ranks reduce between the operators is reduced here."""
    x, weight, target = (
        torch.randn(ROWS, WIDTH).to(dtype),
        torch.randn(RANKS * EACH, WIDTH).div(4).to(dtype),
        tokens(index),
    )
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        exact_x @ exact_weight.t(), target.long(), reduction="none"
    )
    slope = torch.randn(ROWS)
    expected.backward(slope.double())

    parts = [each.npu() for each in weight.split(EACH)]
    ranks = [
        torch_npu.npu_fused_linear_online_max_sum(
            x.npu(), part, target.npu(), i * EACH, (i + 1) * EACH - 1, return_logits=keep
        )
        for i, part in enumerate(parts)
    ]
    maxima = torch.stack([each[0] for each in ranks]).amax(0)
    total = sum(each[1] * (each[0] - maxima).exp() for each in ranks)
    # The logits of the ranks that have the token, rebased from each rank's own maximum to the
    # global one.
    local_rows = [torch.from_numpy(own_rows(each[3])).npu() for each in ranks]
    predicted = sum(
        (each[2] + each[0] - maxima) * here for each, here in zip(ranks, local_rows, strict=True)
    )
    tolerance = 2e-2 if dtype is torch.bfloat16 else 4e-3
    whole, gradients = torch.zeros(ROWS, WIDTH, dtype=torch.double), []
    for part, (_, _, _, mask, place, logits) in zip(parts, ranks, strict=True):
        assert (logits is None) != keep
        loss, softmax = torch_npu.npu_fused_cross_entropy_loss_with_max_sum(
            maxima, total, predicted, vocab_parallel_logits=logits
        )
        torch.testing.assert_close(loss.cpu().double(), expected.detach(), rtol=1e-4, atol=1e-4)
        kept = {"softmax": softmax} if keep else {"logits_max": maxima, "sum_exp_logits": total}
        of_x, of_weight = torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
            slope.npu(), x.npu(), part, mask, place, **kept
        )
        whole += of_x.cpu().double()
        gradients.append(of_weight.cpu().double())
    torch.testing.assert_close(whole, exact_x.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        torch.cat(gradients), exact_weight.grad, rtol=tolerance, atol=tolerance
    )


def own_rows(mask):
    """1 for the rows whose token the rank has, from its packed mask, whose first row is the highest
    bit."""
    return (1 - np.unpackbits(mask.cpu().numpy())[:ROWS]).astype("float32")


def test_mask_and_places():
    """Rows past the last count as masked: 9 rows are 16 bits."""
    target = torch.tensor([3, 4, 5, 6, 7, 8, 9, 100, 4], dtype=torch.int32)
    x, weight = torch.randn(9, 16).half().npu(), torch.randn(5, 16).half().npu()
    _, _, predicted, mask, place, _ = torch_npu.npu_fused_linear_online_max_sum(
        x, weight, target.npu(), 4, 8
    )
    assert mask.tolist() == [0b10000011, 0b01111111]
    assert place.tolist() == [0, 0, 1, 2, 3, 4, 0, 0, 0]
    assert (predicted.cpu() == 0)[[0, 6, 7]].all()


def test_what_the_documentation_excludes_is_refused():
    calls, rows, half = Calls(), torch.zeros(ROWS).npu(), torch.float16
    x, weight = (
        torch.zeros(ROWS, WIDTH, dtype=half).npu(),
        torch.zeros(EACH, WIDTH, dtype=half).npu(),
    )
    mask, place = torch.zeros(2, dtype=torch.uint8).npu(), tokens().npu()
    outs = (rows, rows, rows, mask, place, None)
    for given, message in (
        ((x.float(), weight), "input is Float (DT_FLOAT); allowed: Half, BFloat16"),
        ((x, weight[:, :8].contiguous()), "weight has shape [128, 8]; it must be [128, 48]"),
    ):
        refusal = calls.refusal("FusedLinearOnlineMaxSum", *given, place, 0, 8, *outs)
        assert refusal.startswith(message)
    for first, last in ((-1, 8), (9, 8), (0, EACH)):
        message = calls.refusal("FusedLinearOnlineMaxSum", x, weight, place, first, last, *outs)
        assert message.startswith(
            f"vocab_start_index is {first} and vocab_end_index {last}; allowed: from 0 on"
        )
    loss = ("FusedCrossEntropyLossWithMaxSum", rows, rows, rows)
    assert (
        calls.refusal(*loss, 0.1, None, None, None, rows, None)
        == "label_smoothing is 0.1; only 0 is supported"
    )
    assert (
        calls.refusal(*loss, 0.0, x, None, None, rows, None)
        == "input or weight is given; only None is supported"
    )
    grad = ("FusedLinearCrossEntropyLossGrad", rows, x)
    few = weight[:64].contiguous()
    assert (
        calls.refusal(*grad, few, mask, place, 0.0, rows, rows, None, x, few)
        == "weight has 64 rows; at least 128"
    )
    message = "softmax is null; without it logits_max and sum_exp_logits are needed"
    assert calls.refusal(*grad, weight, mask, place, 0.0, rows, None, None, x, weight) == message
