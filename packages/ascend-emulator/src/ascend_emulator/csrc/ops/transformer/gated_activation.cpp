// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Gated activations, with optional quantization. Semantics and limits: torch_npu's documentation of
// npu_swiglu, npu_swiglu_quant, npu_dequant_swiglu_quant, npu_clipped_swiglu, npu_gelu_mul and
// npu_geglu (torch_npu/_op_plugin_docs.py, BSD) and op-plugin's tests of them.
#include "operator/shapes.h"
#include "ops/quantization/quantized.h"
#include "ops/rows/rows.h"

using namespace emu;

namespace {

void swiglu(const Tensor& x, int64_t at_dim, Tensor& out) {
  if (at_dim != x.dim() - 1 || !x.is_contiguous() || !out.is_contiguous()) {
    const auto halves = x.to(at::kFloat).chunk(2, at_dim);
    out.copy_(at::silu(halves[0]).mul_(halves[1]));
    return;
  }
  if (out.numel()) swiglu_rows(x, out);
}

void check_even(const Tensor& x, int64_t dim) {
  require(
      x.size(dim) % 2 == 0, "dimension ", dim, " of x has size ", x.size(dim), "; it must be even");
}

Tensor swish_of_halves(const Tensor& x, bool left) {
  const auto halves = x.chunk(2, -1);
  return left ? at::silu(halves[0]) * halves[1] : at::silu(halves[1]) * halves[0];
}

// gate * sigmoid(alpha * gate) * (value + bias) of the clamped gate and value.
Tensor clipped(const Tensor& gate, const Tensor& value, double alpha, double limit, double bias) {
  const auto g = gate.clamp_max(limit);
  return g * at::sigmoid(g * alpha) * (value.clamp(-limit, limit) + bias);
}

}  // namespace

CHECKED(aclnnSwiGlu, (Tensor x, int64_t dim, Tensor out), {
  dim = real_dim(dim, x.dim());
  check_even(x, dim);
  Shape half(x.sizes());
  half[dim] /= 2;
  SHAPE(out, half);
  COMPUTE { swiglu(x, dim, out); };
})

CHECKED(aclnnSwiGluQuantV2,
    (Tensor x, Opt<Tensor> smooth, Opt<Tensor> offsets, Opt<Tensor> group_index, bool left,
        Text mode, int64_t list_type, int32_t type, Tensor out, Tensor scale),
    {
      const bool four_bits = type == kAclInt4;
      if (four_bits) multiple("the last dimension of x", x.size(-1), 4);
      const bool dynamic = mode == "dynamic";
      if (smooth) {
        const int64_t groups = group_index ? group_index->numel()
                               : smooth->dim() == 1 && smooth->numel() == x.size(-1) / 2
                                   ? smooth->size(0)
                                   : 1;
        require(
            smooth->size(0) == groups &&
                (smooth->dim() == 1 || (smooth->dim() == 2 && smooth->size(1) == x.size(-1) / 2)),
            "smooth_scales has shape ", smooth->sizes(), "; allowed: [", groups, ", ",
            x.size(-1) / 2, "] and [", groups, "]");
      }
      require(dynamic || smooth, "static quantization needs smooth_scales");
      if (!dynamic && offsets) shape("offsets", *offsets, smooth->sizes());
      COMPUTE {
        auto values = swish_of_halves(x.to(at::kFloat).reshape({-1, x.size(-1)}), left);
        const auto shift = dynamic ? Opt<Tensor>() : offsets;
        if (group_index) {
          for (const auto& [group, first, last] :
              rows_of(*group_index, list_type, values.size(0))) {
            auto part = values.narrow(0, first, last - first);
            part.mul_((*smooth)[group]);
            if (shift) part.add_((*shift)[group]);
          }
        } else if (smooth) {
          values = values * *smooth;
          if (shift) values = values + *shift;
        }
        const auto rounded = out.view({values.size(0), -1});
        if (!dynamic) return store_rounded(values, rounded, four_bits);
        // The returned scale is 127 / the row's largest magnitude (op-plugin's
        // test_npu_swiglu_quant.py).
        quantize_rows(values, rounded, scale, four_bits);
        scale.reciprocal_();
      };
    })

CHECKED(aclnnDequantSwigluQuantV2,
    (Tensor x, Opt<Tensor> weight_scale, Opt<Tensor> activation_scale, Opt<Tensor> bias,
        Opt<Tensor> quant_scale, Opt<Tensor> quant_offset, Opt<Tensor> group_index, bool left,
        Text mode, int64_t dst_type, Text round_mode, int64_t dim, int64_t swiglu_mode,
        double limit, double alpha, double glu_bias, Tensor out, Tensor scale),
    {
      rule("dequant_swiglu_quant.dim", at::maybe_wrap_dim(dim, x.dim()) == x.dim() - 1,
          "activate_dim is ", dim, "; only the last dimension is emulated");
      const bool dynamic = mode == "dynamic", integers = x.scalar_type() == at::kInt;
      const int64_t columns = x.size(-1), groups = group_index ? group_index->numel() : 1;
      rule("dequant_swiglu_quant.scale-sizes", [&] {
        require(!weight_scale || weight_scale->numel() == groups * columns,
            "weight_scale does not have the shape [", groups, ", ", columns, "]");
        require(!activation_scale || activation_scale->numel() == x.numel() / columns,
            "activation_scale does not have one element for each of ", x.numel() / columns,
            " tokens");
      });
      rule("dequant_swiglu_quant.groups-quant-mode", !group_index || dynamic,
          "with group_index, quant_mode must be 1");
      require(dynamic || quant_scale, "static quantization needs quant_scale");
      // Its tiles are too small for the broadcast scales of many short rows.
      rule("dequant_swiglu_quant.columns", !dynamic || columns >= 1024, "x has ", columns,
          " columns; dynamic quantization of less than 1024 may overrun its buffer of scales");
      COMPUTE {
        const auto rows = x.reshape({-1, columns});
        const auto rounded = out.view({rows.size(0), columns / 2});
        const auto steps = scale.view({-1});
        const auto parts = group_index ? rows_of(*group_index, 1, rows.size(0))
                                       : std::vector<Rows>{{0, 0, rows.size(0)}};
        for (const auto& [group, first, last] : parts) {
          if (last == first) continue;
          const auto mine = [&, first = first, count = last - first](
                                const Tensor& t) { return t.narrow(0, first, count); };
          auto values = mine(rows);
          if (integers) {
            if (bias && bias->scalar_type() == at::kInt)
              values = values + bias->reshape({1, columns});
            values = values.to(at::kFloat) * weight_scale->view({groups, columns})[group];
            if (activation_scale) values = values * mine(activation_scale->reshape({-1, 1}));
            if (bias && bias->scalar_type() != at::kInt)
              values = values + bias->to(at::kFloat).reshape({1, columns});
          } else {
            values = values.to(at::kFloat);
          }
          if (swiglu_mode == 1) {
            const auto pairs = values.unflatten(-1, {-1, 2});
            values = clipped(pairs.select(-1, 0), pairs.select(-1, 1), alpha, limit, glu_bias);
          } else {
            values = swish_of_halves(values, left);
          }
          const auto factor = quant_scale ? (quant_scale->dim() == 2 ? (*quant_scale)[group]
                                                : group_index        ? (*quant_scale)[group]
                                                                     : *quant_scale)
                                                .to(at::kFloat)
                                          : Tensor();
          if (dynamic) {
            if (factor.defined()) values = values * factor;
            quantize_rows(values, mine(rounded), mine(steps), false);
          } else {
            values = values / factor;
            if (quant_offset) values = values + quant_offset->to(at::kFloat);
            store_rounded(values, rounded, false);
          }
        }
      };
    })
CHECKED(aclnnDequantSwigluQuant,
    (Tensor x, Opt<Tensor> weight_scale, Opt<Tensor> activation_scale, Opt<Tensor> bias,
        Opt<Tensor> quant_scale, Opt<Tensor> quant_offset, Opt<Tensor> group_index, bool left,
        Text mode, Tensor out, Tensor scale),
    {
      return body_aclnnDequantSwigluQuantV2(x, weight_scale, activation_scale, bias, quant_scale,
          quant_offset, group_index, left, mode, 0, "", -1, 0, 0, 0, 0, out, scale);
    })

// With a group index only the counted rows are written; the others keep their values.
CHECKED(aclnnClippedSwiglu,
    (Tensor x, Opt<Tensor> group_index, int64_t dim, double alpha, double limit, double bias,
        bool interleaved, Tensor out),
    {
      const int64_t at_dim = at::maybe_wrap_dim(dim, x.dim());
      check_even(x, at_dim);
      COMPUTE {
        int64_t before = 1;
        for (int64_t i = 0; i < at_dim; ++i) before *= x.size(i);
        const auto rows = x.reshape({before, -1});
        const int64_t count =
            group_index ? std::min(before, group_index->sum().item<int64_t>()) : before;
        const auto fp32 = rows.narrow(0, 0, count).to(at::kFloat);
        const auto pairs = interleaved ? fp32.unflatten(-1, {-1, 2}) : Tensor();
        const auto halves = fp32.chunk(2, -1);
        out.view({before, -1})
            .narrow(0, 0, count)
            .copy_(interleaved
                       ? clipped(pairs.select(-1, 0), pairs.select(-1, 1), alpha, limit, bias)
                       : clipped(halves[0], halves[1], alpha, limit, bias));
      };
    })

CHECKED(aclnnGeluMul, (Tensor x, Text approximate, Tensor out), {
  check_even(x, -1);
  within("the product of the other dimensions", x.numel() / x.size(-1), 0, 200000);
  const char* kind = approximate == "tanh" ? "tanh" : "none";
  COMPUTE {
    const auto halves = x.to(at::kFloat).chunk(2, -1);
    out.copy_(at::gelu(halves[0], kind) * halves[1]);
  };
})

// approximate: 1 tanh, 0 none. gelu(gate) is a second output, for the gradient.
CHECKED(aclnnGeGluV3,
    (Tensor x, int64_t dim, int64_t approximate, bool left, Tensor out, Tensor gelu_out), {
      check_even(x, dim);
      COMPUTE {
        const auto halves = x.to(at::kFloat).chunk(2, dim);
        const auto gelu = at::gelu(halves[left ? 0 : 1], approximate ? "tanh" : "none");
        gelu_out.copy_(gelu);
        out.copy_(gelu * halves[left ? 1 : 0]);
      };
    })
CHECKED(aclnnGeGluV3Backward,
    (Tensor grad, Tensor x, Tensor gelu, int64_t dim, int64_t approximate, bool left, Tensor out), {
      check_even(x, dim);
      COMPUTE {
        const auto halves = x.to(at::kFloat).chunk(2, dim);
        const auto fp32 = grad.to(at::kFloat);
        const auto to_gate = at::gelu_backward(fp32 * halves[left ? 1 : 0], halves[left ? 0 : 1],
                       approximate ? "tanh" : "none"),
                   to_value = fp32 * gelu.to(at::kFloat);
        out.copy_(
            left ? at::concat({to_gate, to_value}, dim) : at::concat({to_value, to_gate}, dim));
      };
    })

CHECKED(aclnnSwiGluGrad, (Tensor grad, Tensor x, int64_t dim, Tensor out), {
  check_even(x, dim);
  COMPUTE {
    const auto halves = x.to(at::kFloat).chunk(2, dim);
    const auto fp32 = grad.to(at::kFloat);
    out.copy_(at::concat(
        {at::silu_backward(fp32 * halves[1], halves[0]), fp32 * at::silu(halves[0])}, dim));
  };
})
