// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// LayerNorm, AddLayerNorm and DeepNorm, and gradients. Argument order: op-plugin's call sites.
#include "ops/upcast.h"
#include "normalization.h"

namespace {

using namespace emu;

struct LayerNormed {
  Tensor y, mean, rstd;
};
LayerNormed layer(const Tensor& fp32, const Tensor& gamma, const Tensor& beta, double epsilon) {
  const auto dims = dims_of(fp32, gamma);
  const auto mean = fp32.mean(dims, true), centered = fp32 - mean;
  const auto rstd = (centered.square().mean(dims, true) + epsilon).rsqrt();
  return {centered * rstd * gamma.to(at::kFloat) + beta.to(at::kFloat), mean, rstd};
}

// Gradients of a layer norm with respect to the input, gamma and beta.
struct LayerGrads {
  Tensor x, gamma, beta;
};
LayerGrads layer_grad(const Tensor& grad, const Tensor& fp32, const Tensor& gamma,
    const Tensor& mean, const Tensor& rstd) {
  const auto dims = dims_of(fp32, gamma);
  Ints like(fp32.dim(), 1);
  for (int64_t i = 0; i < fp32.dim() - gamma.dim(); ++i) like[i] = fp32.size(i);
  const auto g = grad.to(at::kFloat), inverse = rstd.reshape(like),
             normed = (fp32 - mean.reshape(like)) * inverse, scaled = g * gamma.to(at::kFloat);
  return {
      inverse * (scaled - scaled.mean(dims, true) - normed * (scaled * normed).mean(dims, true)),
      at::sum_to(g * normed, gamma.sizes()), at::sum_to(g, gamma.sizes())};
}

// Both are of x's dtype, or of float32, as ATen has it.
void check_parameters(const Tensor& x, const Opt<Tensor>& weight, const Opt<Tensor>& bias) {
  for (const auto& [name, w] : {std::pair{"weight", &weight}, std::pair{"bias", &bias}})
    if (*w) one_of(name, **w, {x.scalar_type(), at::kFloat});
  if (weight && bias) same_dtype("bias", *bias, "weight", *weight);
}

}  // namespace

#define LAYER_NORM(NAME)                                                                     \
  SHAPED(NAME,                                                                               \
      (Tensor x, Ints shape, Opt<Tensor> weight, Opt<Tensor> bias, double epsilon, Tensor y, \
          Opt<Tensor> mean, Opt<Tensor> rstd),                                               \
      check_parameters(x, weight, bias), {                                                   \
        if (!x.numel()) { /* ATen's mean has another shape then */                           \
          for (const auto& each : {mean, rstd})                                              \
            if (each) each->zero_();                                                         \
          return;                                                                            \
        }                                                                                    \
        const auto [out, m, r] = at::native_layer_norm(x, shape, weight, bias, epsilon);     \
        y.copy_(out);                                                                        \
        if (mean) mean->copy_(m);                                                            \
        if (rstd) rstd->copy_(r);                                                            \
      })
LAYER_NORM(aclnnLayerNorm)
LAYER_NORM(aclnnFastLayerNorm)  // with use_compatible_impl
OP(aclnnLayerNormBackward,
    (Tensor grad, Tensor input, Ints shape, Tensor mean, Tensor rstd, Opt<Tensor> weight,
        Opt<Tensor> bias, Bools mask, Opt<Tensor> grad_input, Opt<Tensor> grad_weight,
        Opt<Tensor> grad_bias),
    {
      const auto [x, w, b] = at::native_layer_norm_backward(upcast(grad), upcast(input), shape,
          upcast(mean), upcast(rstd), upcast(weight), upcast(bias), {mask[0], mask[1], mask[2]});
      copy_if_given(grad_input, x);
      copy_if_given(grad_weight, w);
      copy_if_given(grad_bias, b);
    })
CHECKED(aclnnAddLayerNorm,
    (Tensor a, Tensor b, Tensor gamma, Tensor beta, Opt<Tensor> bias, double epsilon,
        bool keeps_sum, Tensor y, Tensor mean, Tensor rstd, Tensor sum),
    {
      check_norm("x1", a, gamma, kFloating);
      COMPUTE {
        auto total = sum_of(a, b);
        if (bias) total = total + bias->to(at::kFloat);
        const auto normed = layer(total, gamma, beta, epsilon);
        y.copy_(normed.y);
        copy_reshaped(mean, normed.mean);
        copy_reshaped(rstd, normed.rstd);
        if (keeps_sum) sum.copy_(total);
      };
    })
CHECKED(aclnnAddLayerNormGrad,
    (Tensor grad, Tensor a, Tensor b, Tensor rstd, Tensor mean, Tensor gamma, Opt<Tensor> sum_grad,
        Tensor x_grad, Tensor gamma_grad, Tensor beta_grad),
    {
      check_norm("x1", a, gamma, kFloating);
      COMPUTE {
        const auto grads = layer_grad(grad, sum_of(a, b), gamma, mean, rstd);
        x_grad.copy_(sum_grad ? grads.x + sum_grad->to(at::kFloat) : grads.x);
        gamma_grad.copy_(grads.gamma);
        beta_grad.copy_(grads.beta);
      };
    })
// The layer norm of alpha * x + gx.
CHECKED(aclnnDeepNorm,
    (Tensor x, Tensor gx, Tensor beta, Tensor gamma, double alpha, double epsilon, Tensor mean,
        Tensor rstd, Tensor y),
    {
      check_norm("x", x, gamma, kFloating);
      COMPUTE {
        const auto normed =
            layer(x.to(at::kFloat) * alpha + gx.to(at::kFloat), gamma, beta, epsilon);
        y.copy_(normed.y);
        copy_reshaped(mean, normed.mean);
        copy_reshaped(rstd, normed.rstd);
      };
    })
CHECKED(aclnnDeepNormGrad,
    (Tensor grad, Tensor x, Tensor gx, Tensor gamma, Tensor mean, Tensor rstd, double alpha,
        Tensor x_grad, Tensor gx_grad, Tensor beta_grad, Tensor gamma_grad),
    {
      check_norm("x", x, gamma, kFloating);
      COMPUTE {
        const auto grads =
            layer_grad(grad, x.to(at::kFloat) * alpha + gx.to(at::kFloat), gamma, mean, rstd);
        x_grad.copy_(grads.x * alpha);
        gx_grad.copy_(grads.x);
        gamma_grad.copy_(grads.gamma);
        beta_grad.copy_(grads.beta);
      };
    })
