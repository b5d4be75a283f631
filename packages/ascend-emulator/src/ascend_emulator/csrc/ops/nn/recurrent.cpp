// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// LSTM and GRU layers over sequences, and their gradients (op-plugin's LSTMKernelNpuOpApi.cpp and
// GRUKernelNpuOpApi.cpp). Parameters are those of torch.nn.LSTM and torch.nn.GRU, for each layer
// and direction: weight_ih, weight_hh and, with biases, bias_ih and bias_hh. What the gradient
// needs is kept as [time, batch, hidden] for each layer and direction. A packed input is [time *
// batch, size] with its padding (PackPaddedSequenceKernelNpuOpApi.cpp), and batch_sizes has the
// number of sequences of each step, sorted by length. Padding has y 0, as op-plugin's test_lstm.py
// wants, and leaves states as they are. And the LSTM cell behind its matrix products.
#include "ops/upcast.h"

namespace {
using namespace emu;

struct Recurrent {
  int64_t gates;
  Tensors parameters;
  bool biases;
  int64_t layers;
  bool bidirectional, batch_first;
  Opt<Tensor> batch_sizes;

  bool packed() const { return batch_sizes && batch_sizes->numel() > 0; }
  int64_t steps(const Tensor& input) const {
    return packed() ? batch_sizes->numel() : input.size(batch_first);
  }
  int64_t batch(const Tensor& input) const {
    return packed() ? input.size(0) / steps(input) : input.size(!batch_first);
  }
  Ints output_shape(const Tensor& input) const {
    const auto width = hidden() * directions();
    return packed() ? Ints{steps(input), batch(input), width}
                    : Ints{input.size(0), input.size(1), width};
  }
  int64_t directions() const { return bidirectional ? 2 : 1; }
  int64_t cells() const { return layers * directions(); }
  int64_t hidden() const { return parameters[0].size(0) / gates; }
  int64_t each() const { return biases ? 4 : 2; }
  Tensor parameter(int64_t cell, int64_t which) const {
    return upcast(parameters[cell * each() + which]);
  }
  // [time, batch, size]
  Tensor by_time(const Tensor& x) const {
    if (packed() && x.dim() == 2) return x.reshape({steps(x), batch(x), x.size(1)});
    return batch_first ? x.transpose(0, 1) : x;
  }
  // Mask of [time, batch, 1] without padding; undefined if there is no padding.
  Tensor valid(const Tensor& input) const {
    if (!packed()) return {};
    const auto counts = batch_sizes->to(at::kLong);
    check(counts.le(batch(input)).all().item<bool>() && counts.diff().le(0).all().item<bool>(),
        kOpFailed, "batch_sizes does not fall from ", batch(input), " on");
    return at::arange(batch(input)).lt(counts.unsqueeze(1)).unsqueeze(2);
  }
  int64_t reversed(int64_t cell, int64_t step, int64_t steps) const {
    return cell % directions() ? steps - 1 - step : step;
  }

  void check_arguments(
      const Tensor& input, const Tensors& states, double dropout, bool train) const {
    one_of("input", input, {at::kFloat, at::kHalf});
    rank("input", input, packed() ? 2 : 3);
    if (packed()) {
      one_of("batch_sizes", *batch_sizes, {at::kLong});
      rank("batch_sizes", *batch_sizes, 1);
      require(!batch_first && input.size(0) % steps(input) == 0, "batch_sizes has ", steps(input),
          " steps, the input ", input.size(0), " rows and batch_first is ", batch_first,
          "; a packed input has time * batch rows");
    }
    within("num_layers", layers, int64_t{1}, int64_t{1024});
    require(static_cast<int64_t>(parameters.size()) == cells() * each(), "params has ",
        parameters.size(), " tensors; ", cells() * each(), " are needed");
    for (int64_t cell = 0; cell < cells(); ++cell) {
      const int64_t inner = cell < directions() ? input.size(-1) : hidden() * directions();
      for (int64_t which = 0; which < each(); ++which) {
        const auto& given = parameters[cell * each() + which];
        same_dtype("params", given, "input", input);
        if (which > 1) shape("params", given, {gates * hidden()});
        else shape("params", given, {gates * hidden(), which ? hidden() : inner});
      }
    }
    for (const auto& state : states) {
      same_dtype("hx", state, "input", input);
      shape("hx", state, {cells(), batch(input), hidden()});
    }
    require(!train || dropout == 0 || layers == 1, "dropout is ", dropout,
        "; between layers only 0 is emulated: its mask is not returned");
  }

  // step(cell, time, matmuls of the input): the next hidden state.
  template <class Step>
  Tensor forward(const Tensor& input, const Tensor& valid, Step&& step) const {
    auto x = by_time(upcast(input));
    for (int64_t layer = 0; layer < layers; ++layer) {
      Tensors sides;
      for (int64_t cell = layer * directions(); cell < (layer + 1) * directions(); ++cell) {
        auto products = at::matmul(x, parameter(cell, 0).t());
        if (biases) products = products + parameter(cell, 2);
        Tensors hidden_states(x.size(0));
        for (int64_t i = 0; i < x.size(0); ++i) {
          const auto time = reversed(cell, i, x.size(0));
          hidden_states[time] = step(cell, time, products[time]);
        }
        sides.push_back(at::stack(hidden_states));
      }
      x = at::concat(sides, -1);
    }
    if (valid.defined()) x = x * valid;
    return by_time(x);
  }

  Tensor recurrent_products(int64_t cell, const Tensor& state) const {
    const auto products = at::matmul(state, parameter(cell, 1).t());
    return biases ? products + parameter(cell, 3) : products;
  }

  // step(cell, time, time before or -1, gradient of the hidden state): the gradients of the input's
  // and of the state's matmuls. It keeps the gradient of the state before.
  template <class Step> Tensor backward(const Tensor& input, const Tensor& valid,
      const Tensor& start, const Tensors& states, const Tensor& grad, const Tensors& out,
      Step&& step) const {
    auto slope = by_time(grad);
    if (valid.defined()) slope = slope * valid;
    const int64_t steps = slope.size(0);
    for (int64_t layer = layers - 1; layer >= 0; --layer) {
      const int64_t first = layer * directions();
      const auto below = Tensors(
          states.begin() + std::max<int64_t>(first - directions(), 0), states.begin() + first);
      const auto x = layer ? upcast(at::concat(below, -1)) : by_time(upcast(input));
      const auto sides = slope.chunk(directions(), -1);
      slope = at::zeros_like(x);
      for (int64_t cell = first; cell < first + directions(); ++cell) {
        Tensors of_input(steps), of_state(steps), before(steps);
        for (int64_t i = steps - 1; i >= 0; --i) {
          const auto time = reversed(cell, i, steps),
                     previous = i ? reversed(cell, i - 1, steps) : -1;
          std::tie(of_input[time], of_state[time]) =
              step(cell, time, previous, sides[cell - first][time]);
          before[time] = upcast(i ? states[cell][previous] : start[cell]);
        }
        const auto inputs = at::stack(of_input).flatten(0, 1),
                   recurrent = at::stack(of_state).flatten(0, 1);
        slope = slope + at::matmul(at::stack(of_input), parameter(cell, 0));
        const auto place = [&](int64_t which) { return out[cell * each() + which]; };
        place(0).copy_(at::matmul(inputs.t(), x.flatten(0, 1)));
        place(1).copy_(at::matmul(recurrent.t(), at::stack(before).flatten(0, 1)));
        if (!biases) continue;
        place(2).copy_(inputs.sum(0));
        place(3).copy_(recurrent.sum(0));
      }
    }
    return packed() ? slope.reshape(input.sizes()) : by_time(slope);
  }
};

// A step's value where it is no padding, else the one before.
Tensor carried(const Tensor& valid, int64_t time, const Tensor& next, const Tensor& before) {
  return valid.defined() ? at::where(valid[time], next, before) : next;
}
Tensor masked(const Tensor& valid, int64_t time, const Tensor& x) {
  return valid.defined() ? x * valid[time] : x;
}

void check_kept(std::initializer_list<std::pair<const char*, Opt<Tensors>>> lists,
    const Recurrent& net, const Tensor& input) {
  for (const auto& [name, list] : lists) {
    require(list && static_cast<int64_t>(list->size()) == net.cells(), name, " has ",
        list ? list->size() : 0, " tensors; ", net.cells(), " are needed");
    for (const auto& each : *list)
      shape(name, each, {net.steps(input), net.batch(input), net.hidden()});
  }
}

void check_output(
    const Recurrent& net, const Tensor& input, const Tensor& y, const Tensors& states) {
  shape("output", y, net.output_shape(input));
  for (const auto& state : states)
    shape("hy", state, {net.cells(), net.batch(input), net.hidden()});
}

void check_gradients(const Recurrent& net, const Tensor& input, const Tensor& start,
    const Tensor& out, const Tensors& parameters) {
  shape("grad_input", out, input.sizes());
  shape("grad_hx", start, {net.cells(), net.batch(input), net.hidden()});
  require(parameters.size() == net.parameters.size(), "grad_params has ", parameters.size(),
      " tensors");
  for (size_t i = 0; i < parameters.size(); ++i)
    shape("grad_params", parameters[i], net.parameters[i].sizes());
}

// One per cell, in float32; zeros where there is none.
Tensors per_cell(const Opt<Tensor>& stacked, const Tensor& like) {
  return stacked ? upcast(*stacked).unbind(0) : at::zeros(like.sizes(), at::kFloat).unbind(0);
}

Tensor or_zeros(const Opt<Tensor>& grad, const Recurrent& net, const Tensor& input) {
  return grad ? upcast(*grad) : at::zeros(net.output_shape(input), at::kFloat);
}

Tensor logistic_slope(const Tensor& grad, const Tensor& y) { return grad * y * (1 - y); }
}  // namespace

// Gates in the order input, forget, cell, output.
CHECKED(aclnnLSTM,
    (Tensor input, Tensors parameters, Tensors states, Opt<Tensor> batch_sizes, bool biases,
        int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first, Tensor y,
        Tensor hy, Tensor cy, Opt<Tensors> in, Opt<Tensors> candidate, Opt<Tensors> forget,
        Opt<Tensors> out, Opt<Tensors> hidden, Opt<Tensors> cell_state, Opt<Tensors> squashed),
    {
      require(states.size() == 2 && !parameters.empty(), "hx has ", states.size(),
          " tensors and params ", parameters.size());
      const Recurrent net{4, parameters, biases, layers, bidirectional, batch_first, batch_sizes};
      net.check_arguments(input, states, dropout, train);
      check_output(net, input, y, {hy, cy});
      if (train)
        check_kept({{"i", in}, {"j", candidate}, {"f", forget}, {"o", out}, {"h", hidden},
                       {"c", cell_state}, {"tanhc", squashed}},
            net, input);
      COMPUTE {
        const auto valid = net.valid(input);
        auto h = upcast(states[0]).unbind(0), c = upcast(states[1]).unbind(0);
        y.copy_(net.forward(input, valid, [&](int64_t cell, int64_t time, const Tensor& products) {
          const auto parts = (products + net.recurrent_products(cell, h[cell])).chunk(4, 1);
          const auto i = at::sigmoid(parts[0]), f = at::sigmoid(parts[1]), j = at::tanh(parts[2]),
                     o = at::sigmoid(parts[3]);
          c[cell] = carried(valid, time, f * c[cell] + i * j, c[cell]);
          const auto t = at::tanh(c[cell]);
          h[cell] = carried(valid, time, o * t, h[cell]);
          if (train)
            for (const auto& [list, value] : {std::pair{&in, i}, {&candidate, j}, {&forget, f},
                     {&out, o}, {&hidden, h[cell]}, {&cell_state, c[cell]}, {&squashed, t}})
              (**list)[cell][time].copy_(value);
          return h[cell];
        }));
        hy.copy_(at::stack(h));
        cy.copy_(at::stack(c));
      };
    })
CHECKED(aclnnLstmBackward,
    (Tensor input, Tensors states, Tensors parameters, Opt<Tensor> grad_y, Opt<Tensor> grad_hy,
        Opt<Tensor> grad_cy, Tensors in, Tensors candidate, Tensors forget, Tensors out,
        Tensors hidden, Tensors cell_state, Tensors squashed, Opt<Tensor> batch_sizes, bool biases,
        int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first,
        Opt<Tensor>, Tensor grad_input, Tensor grad_h, Tensor grad_c, Tensors grad_parameters),
    {
      require(states.size() == 2 && !parameters.empty(), "hx has ", states.size(),
          " tensors and params ", parameters.size());
      const Recurrent net{4, parameters, biases, layers, bidirectional, batch_first, batch_sizes};
      net.check_arguments(input, states, dropout, train);
      check_kept({{"i", in}, {"j", candidate}, {"f", forget}, {"o", out}, {"h", hidden},
                     {"c", cell_state}, {"tanhc", squashed}},
          net, input);
      check_gradients(net, input, grad_h, grad_input, grad_parameters);
      COMPUTE {
        const auto valid = net.valid(input);
        auto dh = per_cell(grad_hy, states[0]), dc = per_cell(grad_cy, states[1]);
        grad_input.copy_(net.backward(input, valid, states[0], hidden, or_zeros(grad_y, net, input),
            grad_parameters,
            [&](int64_t cell, int64_t time, int64_t previous, const Tensor& slope) {
              const auto kept = [&](const Tensors& list) { return upcast(list[cell][time]); };
              const auto i = kept(in), j = kept(candidate), f = kept(forget), o = kept(out),
                         t = kept(squashed);
              const auto to_h = slope + dh[cell], to_c = to_h * o * (1 - t.square()) + dc[cell];
              const auto before =
                  upcast(previous < 0 ? states[1][cell] : cell_state[cell][previous]);
              const auto gates = masked(valid, time,
                  at::concat({logistic_slope(to_c * j, i), logistic_slope(to_c * before, f),
                                 to_c * i * (1 - j.square()), logistic_slope(to_h * t, o)},
                      1));
              dc[cell] = carried(valid, time, to_c * f, dc[cell]);
              dh[cell] = carried(valid, time, at::matmul(gates, net.parameter(cell, 1)), dh[cell]);
              return std::pair{gates, gates};
            }));
        grad_h.copy_(at::stack(dh));
        grad_c.copy_(at::stack(dc));
      };
    })

// Gates in the order reset, update, new; `recurrent` is what the reset gate multiplies.
CHECKED(aclnnGRU,
    (Tensor input, Tensors parameters, Tensor state, Opt<Tensor> batch_sizes, bool biases,
        int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first, Tensor y,
        Tensor hy, Opt<Tensors> reset, Opt<Tensors> update, Opt<Tensors> candidate,
        Opt<Tensors> recurrent, Opt<Tensors> hidden),
    {
      require(!parameters.empty(), "params is empty");
      const Recurrent net{3, parameters, biases, layers, bidirectional, batch_first, batch_sizes};
      net.check_arguments(input, {state}, dropout, train);
      check_output(net, input, y, {hy});
      if (train)
        check_kept(
            {{"r", reset}, {"z", update}, {"n", candidate}, {"hn", recurrent}, {"h", hidden}}, net,
            input);
      COMPUTE {
        const auto valid = net.valid(input);
        auto h = upcast(state).unbind(0);
        y.copy_(net.forward(input, valid, [&](int64_t cell, int64_t time, const Tensor& products) {
          const auto from_input = products.chunk(3, 1),
                     from_state = net.recurrent_products(cell, h[cell]).chunk(3, 1);
          const auto r = at::sigmoid(from_input[0] + from_state[0]),
                     z = at::sigmoid(from_input[1] + from_state[1]),
                     n = at::tanh(from_input[2] + r * from_state[2]);
          h[cell] = carried(valid, time, (1 - z) * n + z * h[cell], h[cell]);
          if (train)
            for (const auto& [list, value] : {std::pair{&reset, r}, {&update, z}, {&candidate, n},
                     {&recurrent, from_state[2]}, {&hidden, h[cell]}})
              (**list)[cell][time].copy_(value);
          return h[cell];
        }));
        hy.copy_(at::stack(h));
      };
    })
CHECKED(aclnnGRUBackward,
    (Tensor input, Tensors parameters, Tensor state, Tensor grad_y, Tensor grad_hy, Tensors reset,
        Tensors update, Tensors candidate, Tensors recurrent, Tensors hidden,
        Opt<Tensor> batch_sizes, bool biases, int64_t layers, bool bidirectional, bool batch_first,
        Tensor grad_input, Tensor grad_h, Tensors grad_parameters),
    {
      require(!parameters.empty(), "params is empty");
      const Recurrent net{3, parameters, biases, layers, bidirectional, batch_first, batch_sizes};
      net.check_arguments(input, {state}, 0, true);
      check_kept({{"r", reset}, {"z", update}, {"n", candidate}, {"hn", recurrent}, {"h", hidden}},
          net, input);
      check_gradients(net, input, grad_h, grad_input, grad_parameters);
      COMPUTE {
        const auto valid = net.valid(input);
        auto dh = per_cell(grad_hy, state);
        grad_input.copy_(net.backward(input, valid, state, hidden, upcast(grad_y), grad_parameters,
            [&](int64_t cell, int64_t time, int64_t previous, const Tensor& slope) {
              const auto kept = [&](const Tensors& list) { return upcast(list[cell][time]); };
              const auto r = kept(reset), z = kept(update), n = kept(candidate),
                         to_h = slope + dh[cell];
              const auto before = upcast(previous < 0 ? state[cell] : hidden[cell][previous]);
              const auto to_n = to_h * (1 - z) * (1 - n.square()),
                         to_z = logistic_slope(to_h * (before - n), z),
                         to_r = logistic_slope(to_n * kept(recurrent), r);
              const auto of_state = masked(valid, time, at::concat({to_r, to_z, to_n * r}, 1));
              dh[cell] = carried(
                  valid, time, to_h * z + at::matmul(of_state, net.parameter(cell, 1)), dh[cell]);
              return std::pair{masked(valid, time, at::concat({to_r, to_z, to_n}, 1)), of_state};
            }));
        grad_h.copy_(at::stack(dh));
      };
    })

// Gates in the order input, forget, cell, output. The workspace holds the activated gates for the
// gradient (PyTorch's _thnn_fused_lstm_cell).
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
      workspace.copy_(at::concat({in, forget, candidate, out}, 1));
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
      const auto gates = at::concat(
          {towards_cell * candidate * in * (1 - in),
              towards_cell * upcast(c) * forget * (1 - forget),
              towards_cell * in * (1 - candidate.square()), towards_out * out * (1 - out)},
          1);
      grad_gates.copy_(gates);
      grad_c.copy_(towards_cell * forget);
      copy_if_given(grad_bias, gates.sum(0));
    })
