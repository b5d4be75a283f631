// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// RMSNorm whose result is quantized in groups of 32 with a shared exponent, on Ascend950. No page
// documents them. Arguments and shapes: op-plugin's RmsNormDynamicMxQuantKernelNpuOpApi.cpp and
// AddRmsNormDynamicMxQuantKernelNpuOpApi.cpp (BSD). The norm is that of the other RMSNorms, in
// float32 and not rounded before it is quantized; the quantization is npu_dynamic_mx_quant's.
#include "normalization.h"
#include "ops/quantization/mx_groups.h"

namespace {

using namespace emu;

// The root is rounded once: op-plugin's tests want 1000 for 1e-6, and no neighbour.
Normed exact_rms(const Tensor& fp32, const Tensor& gamma, double epsilon) {
  const auto mean = fp32.square().mean(-1, true).to(at::kDouble);
  const auto rstd = (mean + epsilon).rsqrt().to(at::kFloat);
  return {fp32 * rstd * gamma.to(at::kFloat), rstd};
}

void put_mx(const Tensor& normed, const Opt<Tensor>& beta, const MxGroups& mx, const Tensor& y,
    const Tensor& scale) {
  mx.run(beta ? normed + beta->to(at::kFloat) : normed, -1, y, scale);
}

}  // namespace

CHECKED(aclnnRmsNormDynamicMxQuant,
    (Tensor x, Tensor gamma, Opt<Tensor> beta, double epsilon, int64_t scale_alg, Text round_mode,
        int32_t, bool, Tensor y, Tensor scale, Opt<Tensor> rstd),
    {
      rule("rms_norm_mx_quant.gamma-shape", [&] { shape("gamma", gamma, {x.size(-1)}); });
      check_mx_scales(x.sizes(), -1, kGroup, scale);
      const auto mx = mx_groups(round_mode, kGroup, scale_alg, 0, 0);
      COMPUTE {
        const auto normed = exact_rms(x.to(at::kFloat), gamma, epsilon);
        put_mx(normed.y, beta, mx, y, scale);
        copy_reshaped(rstd, normed.rstd);
      };
    })
CHECKED(aclnnAddRmsNormDynamicMxQuant,
    (Tensor a, Tensor b, Tensor gamma, Opt<Tensor> beta, double epsilon, int64_t scale_alg,
        Text round_mode, int32_t, bool, Tensor y, Tensor sum, Tensor scale, Opt<Tensor> rstd),
    {
      rule("rms_norm_mx_quant.gamma-shape", [&] { shape("gamma", gamma, {a.size(-1)}); });
      check_mx_scales(a.sizes(), -1, kGroup, scale);
      const auto mx = mx_groups(round_mode, kGroup, scale_alg, 0, 0);
      COMPUTE {
        const auto total = sum_of(a, b);
        const auto normed = exact_rms(total, gamma, epsilon);
        sum.copy_(total);
        put_mx(normed.y, beta, mx, y, scale);
        copy_reshaped(rstd, normed.rstd);
      };
    })
