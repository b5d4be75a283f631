// One step of an LSTM, whose products with the weights are done: gates in the order input, forget, cell, output. The workspace
// holds them activated, for the gradient (PyTorch's _thnn_fused_lstm_cell).
#include "ops/wide.h"

using namespace emu;

OP(aclnnThnnFusedLstmCell,
    (Tensor input_gates, Tensor hidden_gates, Tensor c, Opt<Tensor> input_bias, Opt<Tensor> hidden_bias, Tensor hidden,
        Tensor cell, Tensor workspace),
    {
      auto gates = wide(input_gates) + wide(hidden_gates);
      for (const auto& bias : {input_bias, hidden_bias})
        if (bias) gates = gates + wide(*bias);
      const auto parts = gates.chunk(4, 1);
      const auto in = at::sigmoid(parts[0]);
      const auto forget = at::sigmoid(parts[1]);
      const auto candidate = at::tanh(parts[2]);
      const auto out = at::sigmoid(parts[3]);
      const auto next = forget * wide(c) + in * candidate;
      cell.copy_(next);
      hidden.copy_(out * at::tanh(next));
      workspace.copy_(at::cat({in, forget, candidate, out}, 1));
    })
OP(aclnnThnnFusedLstmCellBackward,
    (Opt<Tensor> grad_hidden, Opt<Tensor> grad_cell, Tensor c, Tensor cell, Tensor workspace, bool, Tensor grad_gates,
        Tensor grad_c, Opt<Tensor> grad_bias),
    {
      const auto parts = wide(workspace).chunk(4, 1);
      const auto &in = parts[0], &forget = parts[1], &candidate = parts[2], &out = parts[3];
      const auto squashed = at::tanh(wide(cell));
      auto towards_cell = grad_cell ? wide(*grad_cell) : at::zeros_like(squashed);
      auto towards_out = at::zeros_like(squashed);
      if (grad_hidden) {
        towards_cell = towards_cell + wide(*grad_hidden) * out * (1 - squashed.square());
        towards_out = wide(*grad_hidden) * squashed;
      }
      const auto gates = at::cat({towards_cell * candidate * in * (1 - in), towards_cell * wide(c) * forget * (1 - forget),
                                     towards_cell * in * (1 - candidate.square()), towards_out * out * (1 - out)},
          1);
      grad_gates.copy_(gates);
      grad_c.copy_(towards_cell * forget);
      give(grad_bias, gates.sum(0));
    })
