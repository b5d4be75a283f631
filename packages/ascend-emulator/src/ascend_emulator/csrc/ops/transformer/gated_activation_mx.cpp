// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// SwiGLU whose result is quantized in groups of 32 with a shared exponent, on Ascend950. No page
// documents them. Arguments and shapes: op-plugin's SwigluMxQuantOpApi.cpp and
// SwigluMxQuantWithDualAxisOpApi.cpp (BSD); which half is activated, the clamped form with its
// interleaved halves: torch_npu's documentation of npu_swiglu_quant and npu_dequant_swiglu_quant;
// the quantization is npu_dynamic_mx_quant's.
#include "ops/quantization/mx_groups.h"

using namespace emu;

namespace {

Tensor gated(const Tensor& x, int64_t dim, bool left) {
  const auto halves = x.to(at::kFloat).chunk(2, dim);
  return at::silu(halves[left ? 0 : 1]) * halves[left ? 1 : 0];
}

Tensor gated_and_clamped(const Tensor& x, int64_t dim, double limit, double alpha, double bias) {
  const auto pairs = x.to(at::kFloat).unflatten(dim, {-1, 2});
  const auto gate = pairs.select(dim + 1, 0).clamp_max(limit);
  return gate * at::sigmoid(gate * alpha) * (pairs.select(dim + 1, 1).clamp(-limit, limit) + bias);
}

}  // namespace

CHECKED(aclnnSwigluMxQuant,
    (Tensor x, Opt<Tensor> group_index, int64_t activate_dim, bool activate_left,
        int64_t swiglu_mode, double clamp_limit, double glu_alpha, double glu_bias, int64_t,
        int64_t axis, int32_t, Text round_mode, int64_t scale_alg, double max_dtype_value,
        Tensor out, Tensor scale),
    {
      require_emulated(!group_index, "group_index is not emulated; no document has its form");
      const int64_t dim = at::maybe_wrap_dim(activate_dim, x.dim());
      rule("swiglu_mx_quant.even", x.size(dim) % 2 == 0, "dimension ", dim, " of x has size ",
          x.size(dim), "; it must be even");
      auto sizes = x.sizes().vec();
      sizes[dim] /= 2;
      check_mx_scales(sizes, axis, kGroup, scale);
      const auto mx = mx_groups(round_mode, kGroup, scale_alg, max_dtype_value, 0);
      COMPUTE {
        mx.run(swiglu_mode == 1 ? gated_and_clamped(x, dim, clamp_limit, glu_alpha, glu_bias)
                                : gated(x, dim, activate_left),
            axis, out, scale);
      };
    })

// Along the last dimension, and along the one before it, there in the rows of each group.
CHECKED(aclnnSwigluMxQuantWithDualAxis,
    (Tensor x, Opt<Tensor> group_index, bool activate_left, Text round_mode, int64_t scale_alg,
        int32_t, double dst_type_max, Tensor out, Tensor scale, Tensor other_out,
        Tensor other_scale),
    {
      auto sizes = x.sizes().vec();
      sizes.back() /= 2;
      check_mx_scales(sizes, -1, kGroup, scale);
      if (group_index)
        rule("swiglu_mx_quant_dual.groups-rank", x.dim() == 2, "x has ", x.dim(),
            " dimensions; with group_index 2 are allowed");
      else check_mx_scales(sizes, -2, kGroup, other_scale);
      const auto mx = mx_groups(round_mode, kGroup, scale_alg, dst_type_max, 0);
      COMPUTE {
        const auto values = gated(x, x.dim() - 1, activate_left);
        mx.run(values, -1, out, scale);
        if (group_index) mx.run_in_groups(values, *group_index, other_out, other_scale);
        else mx.run(values, -2, other_out, other_scale);
      };
    })
