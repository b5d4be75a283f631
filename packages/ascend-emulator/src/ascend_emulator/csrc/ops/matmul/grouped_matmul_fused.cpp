// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Grouped matmuls with what follows them: finalizing the routing of experts, and SwiGLU with
// quantization.
#include "grouped_float_product.h"
#include "ops/quantization/mx_groups.h"

using namespace emu;
using namespace emu::grouped;

namespace {

// Adds the experts' rows, weighted by logit, to the rows row_index; the shared expert's input is
// added with its weight.
template <class Matrix> struct Finalize {
  Tensor x;
  Matrix weight;
  Opt<Tensor> scale, bias, offset, antiquant_scale, antiquant_offset, pertoken;
  Tensor list;
  Opt<Tensor> shared, logit, row_index;
  int64_t out_dtype;
  float shared_weight;
  int64_t shared_offset;
  bool transpose_x, transpose_weight;
  int64_t list_kind;
  FIELDS(x, weight, scale, bias, offset, antiquant_scale, antiquant_offset, pertoken, list, shared,
      logit, row_index, out_dtype, shared_weight, shared_offset, transpose_x, transpose_weight,
      list_kind)

  Computation computation(const Tensor& out) const;
  Grouped call_into(const Tensor& out) const {
    const auto several = [](const Opt<Tensor>& t) { return t ? Lists(Tensors{*t}) : Lists(); };
    return {{x}, {weight}, several(bias), several(scale), {}, {}, several(pertoken), list, 3, 0,
        list_kind, 0, {out}};
  }
};
struct FinalizeFractal : Finalize<Weight> {
  FIELDS(x, weight, scale, bias, pertoken, list, shared, logit, row_index, out_dtype, shared_weight,
      shared_offset, transpose_x, transpose_weight, list_kind)
};

template <class Matrix> Computation Finalize<Matrix>::computation(const Tensor& out) const {
  if (shared)
    require(shared_offset >= 0 && shared_offset + shared->size(0) <= out.size(0), "shared_input ",
        shared->sizes(), " at row ", shared_offset, " does not fit the output ", out.sizes());
  const bool floats = is_low_precision(x);
  if (floats)
    FloatGroups{call_into(at::empty({1, 1}, at::kFloat).expand({x.size(0), out.size(1)}))}.check();
  else call_into(out).check_arguments();
  return [=, *this] {
    const auto values = at::zeros({x.size(0), out.size(1)}, at::kFloat);
    if (floats) FloatGroups{call_into(values)}.run();
    else call_into(values).run();
    out.zero_();
    if (shared)
      out.narrow(0, shared_offset, shared->size(0)).copy_(shared->to(at::kFloat) * shared_weight);
    out.index_add_(0, row_index->to(at::kLong), values * logit->to(at::kFloat).unsqueeze(1));
  };
}

}  // namespace

CHECKED(aclnnGroupedMatmulFinalizeRoutingV2, (Finalize<Tensor> call, Tensor out),
    { return call.computation(out); })
CHECKED(aclnnGroupedMatmulFinalizeRoutingV3,
    (Finalize<Tensor> call, Opt<Ints> tuning_config, Tensor out), { return call.computation(out); })
CHECKED(aclnnGroupedMatmulFinalizeRoutingWeightNz, (FinalizeFractal call, Tensor out),
    { return call.computation(out); })
CHECKED(aclnnGroupedMatmulFinalizeRoutingWeightNzV2,
    (Finalize<Weight> call, Opt<Ints> tuning_config, Tensor out), { return call.computation(out); })

namespace {

// float8, HiF8 and float4 on Ascend950: op-plugin's page of npu_grouped_matmul_swiglu_quant_v2. The
// result is in the form of the inputs, with shared exponents or with a scale of each row.
Computation swiglu_quant_of_floats(const Tensor& x, const Tensor& weight,
    const Tensor& weight_scale, const Tensor& x_scale, const Tensor& list, int64_t list_kind,
    int64_t dequant_dtype, const Tensor& out, const Tensor& out_scale) {
  require_emulated(
      dequant_dtype == 0, "dequant_dtype ", dequant_dtype, " is not emulated; torch.float32 is");
  const bool exponents = out_scale.scalar_type() == at::kFloat8_e8m0fnu;
  const int64_t n = columns_of(out) * 2;
  const Grouped call{{x}, {weight}, Lists(), Tensors{weight_scale}, {}, {}, Tensors{x_scale}, list,
      3, 0, list_kind, 0, {at::empty({1, 1}, at::kFloat).expand({x.size(0), n})}};
  FloatGroups{call}.check();
  rule("grouped_matmul_swiglu.exponents-alike",
      exponents == (weight_scale.scalar_type() == at::kFloat8_e8m0fnu), "weight_scale is ",
      weight_scale.scalar_type(), " and output_scale ", out_scale.scalar_type(),
      "; float8_e8m0fnu is allowed for both or neither");
  if (exponents) {
    rule("grouped_matmul_swiglu.exponent-columns", n % 128 == 0, "weight has ", n,
        " columns; with float8_e8m0fnu scales multiples of 128 are allowed");
    check_mx_scales({x.size(0), n / 2}, -1, kGroup, out_scale);
  }
  return [=] {
    auto mine = call;
    const auto values = at::zeros({x.size(0), n}, at::kFloat);
    mine.out = {values};
    FloatGroups{mine}.run();
    const auto parts = rows_of(list, list_kind, x.size(0));
    const int64_t rows = parts.empty() ? 0 : parts.back().last;
    if (rows == 0) return;
    const auto halves = values.narrow(0, 0, rows).chunk(2, -1);
    const auto gated = at::silu(halves[0]) * halves[1];
    const auto result = out.narrow(0, 0, rows), scales = out_scale.narrow(0, 0, rows);
    if (exponents) mx_groups("rint", kGroup, 0, 0, 0).run(gated, -1, result, scales);
    else quantize_along(gated, {-1}, 0, result, scales);
  };
}

// Limits of shapes and combinations of dtypes: documentation of npu_grouped_matmul_swiglu_quant_v2
// for Atlas A2 and A3.
Computation swiglu_quant(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
    const Opt<Tensor>& assist, const Tensor& x_scale, const Opt<Tensor>& smooth, const Tensor& list,
    int64_t list_kind, const Tensor& out, const Tensor& out_scale) {
  const bool int4 = x.scalar_type() == at::kInt, words = weight.scalar_type() == at::kInt;
  const int64_t groups = weight.size(0), k = x.size(1) * (int4 ? kFourBitsInWord : 1),
                n = out.size(1) * 2;
  require(int4 == smooth.has_value(), "smooth_scale is ", smooth ? "" : "not ", "given and x is ",
      x.scalar_type(), "; it belongs to an x of packed int4 (int32)");
  require(n <= 10240, "weight has ", n, " columns; allowed: up to 10240");
  require(k < (words ? 20000 : 65536), "x has ", k, " columns; allowed: below ",
      words ? 20000 : 65536, " for this weight");
  const auto assists = assist ? Lists(Tensors{*assist}) : Lists();
  const Grouped call{{x}, {weight}, assists, Tensors{weight_scale}, {}, {}, Tensors{x_scale}, list,
      3, 0, list_kind, 0, {out}};
  if (int4) {
    require(smooth->sizes() == at::IntArrayRef{groups} ||
                smooth->sizes() == at::IntArrayRef{groups, n / 2},
        "smooth_scale has shape ", smooth->sizes(), "; allowed: [", groups, "] and [", groups, ", ",
        n / 2, "]");
    require(weight.size(1) == k, "x has ", k, " columns and weight ", weight.size(1), " rows");
  } else {
    call.check_arguments();
  }
  return [=] {
    auto unpacked = call;
    if (int4) unpacked.x = {unpack_int4(x)}, unpacked.weight = {unpack_matrix(weight)};
    const auto values = at::zeros({x.size(0), n}, at::kFloat);
    unpacked.run_into(values);
    const auto parts = rows_of(list, list_kind, x.size(0));
    const int64_t rows = parts.empty() ? 0 : parts.back().last;
    const auto halves = values.narrow(0, 0, rows).chunk(2, -1);
    auto gated = at::silu(halves[0]) * halves[1];
    if (smooth) gated = scaled_by_group(gated, smooth->view({groups, -1}), parts);
    quantize_rows(gated, out.narrow(0, 0, rows), out_scale.narrow(0, 0, rows), false);
  };
}

}  // namespace

// weight may be in ND too: op-plugin calls this operator in any case, and its test passes ND, as
// internal formats are off.
CHECKED(aclnnGroupedMatmulSwigluQuantWeightNZ,
    (Tensor x, Weight weight, Opt<Tensor> bias, Opt<Tensor> offset, Tensor weight_scale,
        Tensor x_scale, Tensor list, Tensor out, Tensor out_scale, Opt<Tensor>),
    { return swiglu_quant(x, weight, weight_scale, bias, x_scale, {}, list, 0, out, out_scale); })
namespace {
template <class WeightList> struct SwigluQuant {
  Tensor x;
  WeightList weight;
  Tensors weight_scale;
  Lists assist;
  Opt<Tensor> bias;
  Tensor x_scale;
  Opt<Tensor> smooth;
  Tensor list;
  int64_t dequant_mode, dequant_dtype, quant_mode, list_kind;
  Opt<Ints> tuning_config;
  Tensor out, out_scale;
  FIELDS(x, weight, weight_scale, assist, bias, x_scale, smooth, list, dequant_mode, dequant_dtype,
      quant_mode, list_kind, tuning_config, out, out_scale)

  Computation computation() const {
    if (is_low_precision(x))
      return swiglu_quant_of_floats(x, weight.at(0), weight_scale.at(0), x_scale, list, list_kind,
          dequant_dtype, out, out_scale);
    return swiglu_quant(x, weight.at(0), weight_scale.at(0),
        empty(assist) ? Opt<Tensor>() : Opt<Tensor>(assist->front()), x_scale, smooth, list,
        list_kind, out, out_scale);
  }
};
}  // namespace
CHECKED(
    aclnnGroupedMatmulSwigluQuantV2, (SwigluQuant<Tensors> call), { return call.computation(); })
CHECKED(aclnnGroupedMatmulSwigluQuantWeightNzV2, (SwigluQuant<Weights> call),
    { return call.computation(); })
