// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Legacy graph operators of an LSTM (op_plugin/ops/aclops/LstmKernelNpu.cpp,
// LstmCellKernelNpu.cpp): x is [steps, batch, input], states are [batch, hidden], weights [input, 4
// * hidden] and [hidden, 4 * hidden], the gates in PyTorch's order: i, f, j, o, where j is the
// cell's candidate, also called c. seq_length, of packed sequences, is a mask of [steps, batch,
// hidden]: where it is 0, y is 0 and the states stay as they are.
#include "operator/graph_op.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

struct Gates {
  Tensor i, j, f, o, tanhc;
};

// Attributes of a plain LSTM; others are refused. Returns whether the steps run from the last to
// the first.
bool plain(const Attributes& attributes) {
  const auto direction = attributes.get("direction", Text("UNIDIRECTIONAL"));
  one_of("attribute direction", direction, {Text("UNIDIRECTIONAL"), Text("REDIRECTIONAL")});
  attributes.only("use_peephole", false);
  attributes.only("num_proj", int64_t{0});
  attributes.only("time_major", true);
  attributes.only("activation", Text("tanh"));
  attributes.only("recurrent_activation", Text("sigmoid"));
  attributes.only("forget_bias", 0.0f);
  attributes.only("cell_clip", -1.0f);
  attributes.only("stateful", false);
  attributes.only("merge_mode", Text("concat"));
  const auto keep = attributes.get("keep_prob", 1.0f);
  require(keep == 1.0f || keep == -1.0f, "attribute keep_prob is ", keep, "; computed: 1");
  const auto depth = attributes.get("cell_depth", int64_t{1});
  require(depth == 0 || depth == 1, "attribute cell_depth is ", depth, "; computed: 1");
  one_of("attribute gate_order", attributes.get("gate_order", Text("ifjo")),
      {Text("ifjo"), Text("ifco")});
  attributes.get("is_training", true);  // the gates are written either way
  return direction == Text("REDIRECTIONAL");
}

// Order and padding of the steps of packed sequences.
struct Steps {
  bool reversed;
  Opt<Tensor> mask;

  void check_mask(int64_t steps, int64_t batch, int64_t hidden) const {
    if (!mask) return;
    one_of("seq_length", *mask, {at::kHalf});  // op-plugin's masks
    shape("seq_length", *mask, {steps, batch, hidden});
  }
  // The time at which the i-th step is computed.
  int64_t time(int64_t i, int64_t steps) const { return reversed ? steps - 1 - i : i; }
  Tensor carried(int64_t time, const Tensor& next, const Tensor& before) const {
    return mask ? at::where((*mask)[time] != 0, next, before) : next;
  }
  Tensor masked(int64_t time, const Tensor& x) const { return mask ? x * ((*mask)[time] != 0) : x; }
};

Computation forward(const Tensor& x, const Tensor& w_x, const Tensor& w_h, const Opt<Tensor>& bias,
    const Tensor& init_h, const Tensor& init_c, const std::array<Tensor, 3>& states,
    const Gates& gates, const Steps& order) {
  rank("x", x, 3);
  rank("w", w_h, 2);
  const auto steps = x.size(0);
  const auto batch = x.size(1);
  const auto hidden = w_h.size(0);
  one_of("x", x, kFloating);
  SHAPE(w_x, {x.size(2), 4 * hidden});
  SHAPE(w_h, {hidden, 4 * hidden});
  if (bias) shape("b", *bias, {4 * hidden});
  order.check_mask(steps, batch, hidden);
  require(init_h.numel() == batch * hidden && init_c.numel() == batch * hidden, "init_h has shape ",
      init_h.sizes(), " and init_c ", init_c.sizes(), " for a batch of ", batch, " and ", hidden,
      " hidden values");
  for (const auto& each :
      {states[0], states[1], states[2], gates.i, gates.j, gates.f, gates.o, gates.tanhc})
    shape("an output", each, {steps, batch, hidden});
  COMPUTE {
    Tensor h = upcast(init_h).view({batch, hidden});
    Tensor c = upcast(init_c).view({batch, hidden});
    const auto weight = upcast(w_h);
    auto projected = at::matmul(upcast(x), upcast(w_x));
    if (bias) projected = projected + upcast(*bias);
    for (int64_t step = 0; step < steps; ++step) {
      const auto t = order.time(step, steps);
      const auto parts = (projected[t] + at::matmul(h, weight)).chunk(4, -1);
      const auto i = parts[0].sigmoid();
      const auto f = parts[1].sigmoid();
      const auto j = parts[2].tanh();
      const auto o = parts[3].sigmoid();
      c = order.carried(t, f * c + i * j, c);
      const auto tanhc = c.tanh();
      h = order.carried(t, o * tanhc, h);
      const Tensor* outputs[] = {
          &states[0], &states[1], &states[2], &gates.i, &gates.j, &gates.f, &gates.o, &gates.tanhc};
      const Tensor values[] = {order.masked(t, h), h, c, i, j, f, o, tanhc};
      for (int k = 0; k < 8; ++k) (*outputs[k])[t].copy_(values[k]);
    }
  };
}

struct Gradients {
  Tensor w_x, w_h, bias, x, h, c;
};

// dh and dc are the gradients of the last step's states. Of one step, h and c may have no dimension
// for it.
Computation backward(const Tensor& x, const Tensor& w_x, const Tensor& w_h, const Tensor& y,
    const Tensor& init_h, const Tensor& init_c, const Tensor& all_h, const Tensor& all_c,
    const Tensor& dy, const Tensor& dh, const Tensor& dc, const Gates& gates, const Gradients& out,
    const Steps& order) {
  rank("y", y, 3);
  const auto steps = y.size(0);
  const auto batch = y.size(1);
  const auto hidden = y.size(2);
  require(x.numel() == steps * batch * w_x.size(0), "x has shape ", x.sizes(), " for ", steps,
      " steps, a batch of ", batch, " and ", w_x.size(0), " inputs");
  order.check_mask(steps, batch, hidden);
  for (const auto& each : {dy, gates.i, gates.j, gates.f, gates.o, gates.tanhc})
    shape("dy or a gate", each, {steps, batch, hidden});
  for (const auto& each : {all_h, all_c})
    require(each.numel() == y.numel(), "h or c has shape ", each.sizes(), " for y of shape ",
        y.sizes());
  for (const auto& each : {init_h, init_c, dh, dc, out.h, out.c})
    require(each.numel() == batch * hidden, "a state has shape ", each.sizes(), " for ", batch,
        " x ", hidden);
  COMPUTE {
    const auto all = upcast(x).view({steps, batch, -1});
    const auto h = all_h.view(y.sizes());
    const auto c = all_c.view(y.sizes());
    const auto input_weight = upcast(w_x).t();
    const auto weight = upcast(w_h).t();
    Tensor carried_h = upcast(dh).view({batch, hidden});
    Tensor carried_c = upcast(dc).view({batch, hidden});
    std::vector<Tensor> of_gates(steps), before(steps);
    for (int64_t step = steps; step-- > 0;) {
      const auto t = order.time(step, steps);
      const auto previous = order.time(step - 1, steps);
      const auto i = upcast(gates.i[t]);
      const auto j = upcast(gates.j[t]);
      const auto f = upcast(gates.f[t]);
      const auto o = upcast(gates.o[t]);
      const auto tanhc = upcast(gates.tanhc[t]);
      const auto last = (step ? upcast(c[previous]) : upcast(init_c)).view({batch, hidden});
      before[t] = (step ? upcast(h[previous]) : upcast(init_h)).view({batch, hidden});
      const auto of_h = order.masked(t, upcast(dy[t]) + carried_h);
      const auto of_c = order.masked(t, carried_c + of_h * o * (1 - tanhc * tanhc));
      of_gates[t] = at::concat({of_c * j * i * (1 - i), of_c * last * f * (1 - f),
                                   of_c * i * (1 - j * j), of_h * tanhc * o * (1 - o)},
          -1);
      carried_h = order.carried(t, at::matmul(of_gates[t], weight), carried_h);
      carried_c = order.carried(t, of_c * f, carried_c);
    }
    const auto flat = at::stack(of_gates).view({steps * batch, 4 * hidden});
    out.x.copy_(at::matmul(flat, input_weight).view(out.x.sizes()));
    out.w_x.copy_(at::matmul(all.view({steps * batch, -1}).t(), flat));
    out.w_h.copy_(at::matmul(at::stack(before).view({steps * batch, hidden}).t(), flat));
    out.bias.copy_(flat.sum(0));
    out.h.copy_(carried_h.view(out.h.sizes()));
    out.c.copy_(carried_c.view(out.c.sizes()));
  };
}

// The weight of both inputs, [input + hidden, 4 * hidden].
std::pair<Tensor, Tensor> halves(const Tensor& weight) {
  rank("w", weight, 2);
  const auto hidden = weight.size(1) / 4;
  require(hidden * 4 == weight.size(1) && weight.size(0) > hidden, "w has shape ", weight.sizes());
  return {weight.narrow(0, 0, weight.size(0) - hidden),
      weight.narrow(0, weight.size(0) - hidden, hidden)};
}

// op-plugin passes a tensor of no dimension where there are no packed sequences.
Opt<Tensor> mask_of(const Tensor& seq_length) {
  return seq_length.dim() ? Opt<Tensor>(seq_length) : std::nullopt;
}
}  // namespace

GRAPH_OP(DynamicRNN,
    (Tensor x, Tensor w, Tensor b, Opt<Tensor> seq_length, Tensor init_h, Tensor init_c, Out y,
        Out h, Out c, Out i, Out j, Out f, Out o, Out tanhc, Attributes attributes),
    {
      attributes.only("cell_type", Text("LSTM"));
      const auto [w_x, w_h] = halves(w);
      return forward(x, w_x, w_h, b, init_h, init_c, {y, h, c}, {i, j, f, o, tanhc},
          {plain(attributes), seq_length});
    })
GRAPH_OP(DynamicRNNV2,
    (Tensor x, Tensor w_x, Tensor w_h, Opt<Tensor> b, Opt<Tensor> seq_length, Tensor init_h,
        Tensor init_c, Out y, Out h, Out c, Out i, Out j, Out f, Out o, Out tanhc,
        Attributes attributes),
    {
      attributes.only("cell_type", Text("LSTM"));
      return forward(x, w_x, w_h, b, init_h, init_c, {y, h, c}, {i, j, f, o, tanhc},
          {plain(attributes), seq_length});
    })

// The tensors without a name are placeholders: op-plugin passes zeros of no dimension for those of
// peepholes.
GRAPH_OP(DynamicRNNGrad,
    (Tensor x, Tensor w, Tensor, Tensor y, Tensor init_h, Tensor init_c, Tensor h, Tensor c,
        Tensor dy, Tensor dh, Tensor dc, Tensor i, Tensor j, Tensor f, Tensor o, Tensor tanhc,
        Tensor seq_length, Tensor, Tensor, Tensor, Tensor, Out dw, Out db, Out dx, Out dh_prev,
        Out dc_prev, Attributes attributes),
    {
      attributes.get("cell_type", true);  // op-plugin's "LSTM", which its overloads convert to bool
      const Steps order{plain(attributes), mask_of(seq_length)};
      const auto [w_x, w_h] = halves(w);
      const auto [dw_x, dw_h] = halves(dw);
      return backward(x, w_x, w_h, y, init_h, init_c, h, c, dy, dh, dc, {i, j, f, o, tanhc},
          {dw_x, dw_h, db, dx, dh_prev, dc_prev}, order);
    })
GRAPH_OP(DynamicRNNV2Grad,
    (Tensor x, Tensor w_x, Tensor w_h, Tensor y, Tensor init_h, Tensor init_c, Tensor h, Tensor c,
        Tensor dy, Tensor dh, Tensor dc, Tensor i, Tensor j, Tensor f, Tensor o, Tensor tanhc,
        Tensor seq_length, Tensor, Tensor, Tensor, Tensor, Out dw_x, Out dw_h, Out db, Out dx,
        Out dh_prev, Out dc_prev, Attributes attributes),
    {
      attributes.only("cell_type", Text("LSTM"));
      const Steps order{plain(attributes), mask_of(seq_length)};
      return backward(x, w_x, w_h, y, init_h, init_c, h, c, dy, dh, dc, {i, j, f, o, tanhc},
          {dw_x, dw_h, db, dx, dh_prev, dc_prev}, order);
    })
