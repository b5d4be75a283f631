# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""One step of an LSTM, and its gradient, which PyTorch has in this form only for devices."""

import pytest
import torch
from cann_calls import Calls
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_lstm_cell(agree, dtype, biased):
    shapes = [(3, 20), (3, 20), (3, 5), (20,), (20,), (3, 5), (3, 5)]
    args = [torch.randn(shape).to(dtype) for shape in shapes]

    def step(a, b, c, p, q, grad_h, grad_c):
        biases = (p, q) if biased else (None, None)
        if a.is_npu:
            h, cell, workspace = torch.ops.aten._thnn_fused_lstm_cell(a, b, c, *biases)
            gates, before, bias = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(
                grad_h, grad_c, c, cell, workspace, biased
            )
            return h, cell, gates, before, *([bias] if biased else [])
        preactivations, before = (a + b).requires_grad_(), c.clone().requires_grad_()
        i, f, g, o = (preactivations + p + q if biased else preactivations).chunk(4, 1)
        cell = f.sigmoid() * before + i.sigmoid() * g.tanh()
        h = o.sigmoid() * cell.tanh()
        gates, slope = torch.autograd.grad([h, cell], [preactivations, before], [grad_h, grad_c])
        return h.detach(), cell.detach(), gates, slope, *([gates.sum(0)] if biased else [])

    agree(step, *args, ulps=32)


FORMS = [(1, False, False), (1, True, True), (2, True, False)]


def weights(gates, layers, directions, size=3, hidden=4):
    """For each layer and direction: weight_ih, weight_hh, bias_ih and bias_hh."""
    inner = [
        size if layer == 0 else hidden * directions
        for layer in range(layers)
        for _ in range(directions)
    ]
    shapes = [
        ((gates * hidden, n), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
        for n in inner
    ]
    return [torch.randn(shape) / 2 for cell in shapes for shape in cell]


def near(actual, expected, dtype):
    bound = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        actual.detach().cpu().double(), expected.detach(), rtol=bound, atol=bound
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("batch_first", [False, True], ids=["time first", "batch first"])
def test_lstm_layer(batch_first, dtype):
    """torch.nn.LSTM with its gradients, against itself in float64; torch_npu calls an older
    operator for other forms."""
    exact = torch.nn.LSTM(3, 4, batch_first=batch_first)
    ours = torch.nn.LSTM(3, 4, batch_first=batch_first)
    ours.load_state_dict(exact.state_dict())
    ours, exact, x = ours.to(dtype).npu(), exact.to(dtype).double(), torch.randn(5, 5, 3).to(dtype)
    mine, wide = x.npu().requires_grad_(), x.double().requires_grad_()
    (y, (h, c)), (expected, (exact_h, exact_c)) = ours(mine), exact(wide)
    for actual, wanted in ((y, expected), (h, exact_h), (c, exact_c)):
        near(actual, wanted, dtype)
    slope = torch.randn(y.shape).to(dtype)
    ((y * slope.npu()).sum() + h.sum() + 2 * c.sum()).backward()
    ((expected * slope.double()).sum() + exact_h.sum() + 2 * exact_c.sum()).backward()
    near(mine.grad, wide.grad, dtype)
    for (name, actual), wanted in zip(ours.named_parameters(), exact.parameters(), strict=True):
        assert actual.grad is not None, name
        near(actual.grad, wanted.grad, dtype)


@pytest.mark.parametrize(
    ("layers", "bidirectional", "bias"),
    [(1, False, True), (1, True, False), (2, False, False), (2, True, True)],
    ids=[
        "aclnnLSTM",
        "DynamicRNN both ways",
        "DynamicRNN of two layers",
        "DynamicRNN of two layers both ways",
    ],
)
def test_packed_sequences(layers, bidirectional, bias):
    """Sequences of several sizes, which torch_npu packs with their padding, against torch.nn.LSTM
    in float64.

    Gradients are those of the packed values: ATen's gradient of the packing, which torch_npu keeps,
    is for one without padding. The gradient of the last states is left out where a direction runs
    backwards: npu_lstm_data_backward takes the other end's.
    """
    exact, ours = (
        torch.nn.LSTM(3, 4, layers, bidirectional=bidirectional, bias=bias) for _ in range(2)
    )
    ours.load_state_dict(exact.state_dict())
    ours, exact, x, lengths = ours.npu(), exact.double(), torch.randn(6, 3, 3), [3, 6, 5]
    wide = x.double().requires_grad_()
    given = pack_padded_sequence(x.npu(), lengths, enforce_sorted=False)
    mine = given.data.requires_grad_()
    output, states = ours(given)
    expected, exact_states = exact(pack_padded_sequence(wide, lengths, enforce_sorted=False))
    (y, _), (exact_y, _) = pad_packed_sequence(output), pad_packed_sequence(expected)
    for actual, wanted in zip([y, *states], [exact_y, *exact_states], strict=True):
        near(actual, wanted, torch.float32)
    slopes = [torch.randn(each.shape) * (not bidirectional or each is y) for each in (y, *states)]
    torch.autograd.backward([y, *states], [each.npu() for each in slopes])
    torch.autograd.backward([exact_y, *exact_states], [each.double() for each in slopes])
    near(mine.grad.view(6, 3, 3)[:, given.unsorted_indices], wide.grad, torch.float32)
    for actual, wanted in zip(ours.parameters(), exact.parameters(), strict=True):
        near(actual.grad, wanted.grad, torch.float32)


@pytest.mark.parametrize(("layers", "bidirectional", "batch_first"), FORMS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_by_name(kind, layers, bidirectional, batch_first):
    """Several layers, which torch_npu does not give to these operators, and GRU, which newer
    versions of it do."""
    calls, gates, cells = Calls(), 4 if kind == "LSTM" else 3, layers * (2 if bidirectional else 1)
    exact = getattr(torch.nn, kind)(
        3, 4, layers, batch_first=batch_first, bidirectional=bidirectional
    ).double()
    given, x = weights(gates, layers, 2 if bidirectional else 1), torch.randn(5, 6, 3)
    for parameter, value in zip(exact.parameters(), given, strict=True):
        parameter.data.copy_(value)
    batch, steps = (5, 6) if batch_first else (6, 5)
    states = [torch.randn(cells, batch, 4) for _ in range(2 if kind == "LSTM" else 1)]
    wide, starts = x.double().requires_grad_(), [each.double().requires_grad_() for each in states]
    expected, last = exact(wide, tuple(starts) if kind == "LSTM" else starts[0])
    last = last if kind == "LSTM" else (last,)
    ours, parameters, hx = x.npu(), [each.npu() for each in given], [each.npu() for each in states]
    y, ends = (
        torch.zeros(expected.shape).npu(),
        [torch.zeros(cells, batch, 4).npu() for _ in states],
    )
    kept = [
        [torch.zeros(steps, batch, 4).npu() for _ in range(cells)]
        for _ in range(7 if kind == "LSTM" else 5)
    ]
    where = hx if kind == "LSTM" else hx[0]
    head, flags = (
        (ours, parameters, where, None),
        (True, layers, 0.0, True, bidirectional, batch_first),
    )
    calls.compute(kind, *head, *flags, y, *ends, *kept)
    for actual, wanted in zip([y, *ends], [expected, *last], strict=True):
        near(actual, wanted, torch.float32)
    slopes = [torch.randn(each.shape) for each in (y, *ends)]
    torch.autograd.backward([expected, *last], [each.double() for each in slopes])
    outs = [torch.zeros_like(ours), *[torch.zeros_like(each) for each in hx]]
    grads, back = [torch.zeros_like(each) for each in parameters], [each.npu() for each in slopes]
    if kind == "LSTM":
        calls.compute(
            "LstmBackward", ours, hx, parameters, *back, *kept, None, *flags, None, *outs, grads
        )
    else:
        some = (True, layers, bidirectional, batch_first)
        calls.compute(
            "GRUBackward", ours, parameters, hx[0], *back, *kept, None, *some, *outs, grads
        )
        assert "h has 0 tensors" in calls.refusal(
            "GRUBackward", ours, parameters, hx[0], *back, *kept[:4], [], None, *some, *outs, grads
        )
    wanted = [
        wide.grad,
        *[each.grad for each in starts],
        *[each.grad for each in exact.parameters()],
    ]
    for actual, exact_grad in zip([*outs, *grads], wanted, strict=True):
        near(actual, exact_grad, torch.float32)
    message = calls.refusal(kind, ours, parameters[:-1], where, None, *flags, y, *ends, *kept)
    assert message == f"params has {len(parameters) - 1} tensors; {len(parameters)} are needed"


def test_recurrent_layers_refuse():
    calls, parameters, x = (
        Calls(),
        [each.npu() for each in weights(4, 2, 1)],
        torch.randn(5, 6, 3).npu(),
    )
    hx, outs = (
        [torch.zeros(2, 6, 4).npu()] * 2,
        [torch.zeros(5, 6, 4).npu(), *[torch.zeros(2, 6, 4).npu()] * 2],
    )
    kept = [[torch.zeros(5, 6, 4).npu()] * 2] * 7
    for given, message in (
        (
            (None, True, 2, 0.5, True, False, False),
            "dropout is 0.5; between layers only 0 is emulated: its mask is not returned",
        ),
        (
            (torch.ones(5).long().npu(), True, 2, 0.0, True, False, False),
            "input has 3 dimensions; allowed: 2",
        ),
    ):
        assert calls.refusal("LSTM", x, parameters, hx, *given, *outs, *kept) == message
    for sizes, rows, message in (
        (
            [6, 4],
            31,
            (
                "batch_sizes has 2 steps, the input 31 rows and batch_first is 0; a packed input"
                " has time * batch rows"
            ),
        ),
        ([6, 4], 30, "hx has shape [2, 6, 4]; it must be [2, 15, 4]"),
    ):
        flags = (torch.tensor(sizes).npu(), True, 2, 0.0, True, False, False)
        assert (
            calls.refusal("LSTM", torch.zeros(rows, 3).npu(), parameters, hx, *flags, *outs, *kept)
            == message
        )
    given = (
        x,
        hx,
        parameters,
        *outs,
        *kept[:6],
        [],
        None,
        True,
        2,
        0.0,
        True,
        False,
        False,
        None,
        x,
        *hx,
        parameters,
    )
    assert calls.refusal("LstmBackward", *given) == "tanhc has 0 tensors; 2 are needed"
