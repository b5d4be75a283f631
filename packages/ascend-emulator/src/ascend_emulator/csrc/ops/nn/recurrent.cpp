// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// LSTM cell after the matrix products: gates in the order input, forget, cell, output. The
// workspace holds the activated gates for the gradient (PyTorch's _thnn_fused_lstm_cell).
#include "ops/upcast.h"

using namespace emu;

OP(aclnnThnnFusedLstmCell,
    (Tensor input_gates, Tensor hidden_gates, Tensor c, Opt<Tensor> input_bias,
        Opt<Tensor> hidden_bias, Tensor hidden, Tensor cell, Tensor workspace),
    {
      auto gates = upcast(input_gates) + upcast(hidden_gates);
      for (const auto& bias : {input_bias, hidden_bias})
        if (bias) gates = gates + upcast(*bias);
      const auto parts = gates.chunk(4, 1);
      const auto in = at::sigmoid(parts[0]);
      const auto forget = at::sigmoid(parts[1]);
      const auto candidate = at::tanh(parts[2]);
      const auto out = at::sigmoid(parts[3]);
      const auto next = forget * upcast(c) + in * candidate;
      cell.copy_(next);
      hidden.copy_(out * at::tanh(next));
      workspace.copy_(at::cat({in, forget, candidate, out}, 1));
    })
OP(aclnnThnnFusedLstmCellBackward,
    (Opt<Tensor> grad_hidden, Opt<Tensor> grad_cell, Tensor c, Tensor cell, Tensor workspace, bool,
        Tensor grad_gates, Tensor grad_c, Opt<Tensor> grad_bias),
    {
      const auto parts = upcast(workspace).chunk(4, 1);
      const auto &in = parts[0], &forget = parts[1], &candidate = parts[2], &out = parts[3];
      const auto squashed = at::tanh(upcast(cell));
      auto towards_cell = grad_cell ? upcast(*grad_cell) : at::zeros_like(squashed);
      auto towards_out = at::zeros_like(squashed);
      if (grad_hidden) {
        towards_cell = towards_cell + upcast(*grad_hidden) * out * (1 - squashed.square());
        towards_out = upcast(*grad_hidden) * squashed;
      }
      const auto gates =
          at::cat({towards_cell * candidate * in * (1 - in),
                      towards_cell * upcast(c) * forget * (1 - forget),
                      towards_cell * in * (1 - candidate.square()), towards_out * out * (1 - out)},
              1);
      grad_gates.copy_(gates);
      grad_c.copy_(towards_cell * forget);
      copy_if_given(grad_bias, gates.sum(0));
    })
