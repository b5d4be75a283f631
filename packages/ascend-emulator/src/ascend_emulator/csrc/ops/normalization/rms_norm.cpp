// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// RMSNorm and AddRMSNorm. Sums are computed in float32, as torch_npu's documentation of
// npu_rms_norm says for 16-bit types. Rules: torch_npu's documentation of npu_rms_norm,
// npu_add_rms_norm_cast and npu_gemma_rms_norm (torch_npu/_op_plugin_docs.py), and the golden
// functions of op-plugin's tests; argument order: op-plugin's call sites.
#include "normalization.h"
#include "ops/rows/rows.h"

namespace {

using at::Tensor;

void check_gamma(const Tensor& x, const Tensor& gamma) {
  emu::rule("rms_norm.gamma-shape",
      x.dim() >= gamma.dim() && x.sizes().slice(x.dim() - gamma.dim()) == gamma.sizes(),
      "gamma has shape ", gamma.sizes(), ", which is not the end of x's ", x.sizes());
}

// y = x / rms(x) * gamma over gamma's dimensions, the last ones of x; rstd may be undefined. With
// `added` the norm is of sum = x + added.
void rms_norm(const Tensor& x, const Tensor& gamma, double epsilon, Tensor& y, const Tensor& rstd,
    const Tensor& added = {}, const Tensor& sum = {}) {
  const int64_t width = gamma.numel();
  if (gamma.scalar_type() != x.scalar_type()) {
    auto fp32 = at::empty_like(x, at::kFloat);
    rms_norm(x.to(at::kFloat), gamma, epsilon, fp32, rstd);
    y.copy_(fp32);
    return;
  }
  const auto input = x.contiguous(), weight = gamma.contiguous(),
             other = added.defined() ? added.contiguous() : added;
  auto output = y.is_contiguous() ? y : at::empty_like(input);
  auto total = added.defined() && !sum.is_contiguous() ? at::empty_like(input) : sum;
  emu::rms_norm_rows(input, other, weight, total, output, rstd, epsilon);
  if (!output.is_same(y)) y.copy_(output);
  if (total.defined() && !total.is_same(sum)) sum.copy_(total);
}

}  // namespace

CHECKED(aclnnRmsNorm, (Tensor x, Tensor gamma, double epsilon, Tensor y, Tensor rstd), {
  check_gamma(x, gamma);
  COMPUTE { rms_norm(x, gamma, epsilon, y, rstd); };
})
CHECKED(aclnnAddRmsNorm,
    (Tensor a, Tensor b, Tensor gamma, double epsilon, Tensor y, Tensor rstd, Tensor sum), {
      check_gamma(a, gamma);
      COMPUTE { rms_norm(a, gamma, epsilon, y, rstd, b, sum); };
    })
CHECKED(aclnnAddRmsNormCast,
    (Tensor a, Tensor b, Tensor gamma, double epsilon, Tensor fp32, Tensor y, Tensor rstd,
        Tensor sum),
    {
      check_add_norm(a, b, gamma, kHalves);
      COMPUTE {
        sum.copy_(sum_of(a, b));
        const auto normed = rms(sum.to(at::kFloat), gamma, epsilon);
        y.copy_(normed.y);
        fp32.copy_(y);
        copy_reshaped(rstd, normed.rstd);
      };
    })
CHECKED(aclnnInplaceAddRmsNorm, (Tensor a, Tensor b, Tensor gamma, double epsilon, Tensor rstd), {
  check_add_norm(a, b, gamma, kFloating);
  COMPUTE {
    b.copy_(sum_of(a, b));
    const auto normed = rms(b.to(at::kFloat), gamma, epsilon);
    a.copy_(normed.y);
    copy_reshaped(rstd, normed.rstd);
  };
})
// The weight is 1 + gamma.
CHECKED(aclnnGemmaRmsNorm, (Tensor x, Tensor gamma, double epsilon, Tensor y, Tensor rstd), {
  check_gamma(x, gamma);
  COMPUTE {
    const auto normed = rms(x.to(at::kFloat), gamma.to(at::kFloat) + 1, epsilon);
    y.copy_(normed.y);
    copy_reshaped(rstd, normed.rstd);
  };
})
CHECKED(aclnnRmsNormGrad,
    (Tensor grad, Tensor x, Tensor rstd, Tensor gamma, Tensor x_grad, Tensor gamma_grad), {
      check_norm("self", x, gamma, kFloating);
      shape("dy", grad, x.sizes());
      COMPUTE {
        const auto dims = dims_of(x, gamma);
        Ints like(x.dim(), 1);
        for (int64_t i = 0; i < x.dim() - gamma.dim(); ++i) like[i] = x.size(i);
        const auto g = grad.to(at::kFloat), inverse = rstd.to(at::kFloat).reshape(like),
                   normed = x.to(at::kFloat) * inverse, scaled = g * gamma.to(at::kFloat);
        x_grad.copy_(inverse * (scaled - normed * (scaled * normed).mean(dims, true)));
        gamma_grad.copy_(at::sum_to(g * normed, gamma.sizes()));
      };
    })
