"""One step of an LSTM, and its gradient, which PyTorch has in this form for devices alone."""

import pytest
import torch


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_lstm_cell(agree, dtype, biased):
    shapes = [(3, 20), (3, 20), (3, 5), (20,), (20,), (3, 5), (3, 5)]
    args = [torch.randn(shape).to(dtype) for shape in shapes]

    def step(a, b, c, p, q, grad_h, grad_c):
        biases = (p, q) if biased else (None, None)
        if a.is_npu:
            h, cell, workspace = torch.ops.aten._thnn_fused_lstm_cell(a, b, c, *biases)
            gates, before, bias = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(grad_h, grad_c, c, cell, workspace, biased)
            return h, cell, gates, before, *([bias] if biased else [])
        own, before = (a + b).requires_grad_(), c.clone().requires_grad_()
        i, f, g, o = (own + p + q if biased else own).chunk(4, 1)
        cell = f.sigmoid() * before + i.sigmoid() * g.tanh()
        h = o.sigmoid() * cell.tanh()
        gates, slope = torch.autograd.grad([h, cell], [own, before], [grad_h, grad_c])
        return h.detach(), cell.detach(), gates, slope, *([gates.sum(0)] if biased else [])

    agree(step, *args, ulps=32)
