// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Activations and softmax.
#include "operator/shapes.h"
#include "ops/upcast.h"

// Also for integers (op-plugin's test_hardsigmoid.py).
SHAPED(aclnnHardsigmoid, (Tensor self, Tensor out), SAME(out, self),
    { out.copy_(at::hardsigmoid(self.is_floating_point() ? self : self.to(at::kFloat))); })
OP(aclnnInplaceHardsigmoid, (Tensor self),
    { self.copy_(at::hardsigmoid(self.is_floating_point() ? self : self.to(at::kFloat))); })
OP(aclnnInplaceRelu, (Tensor self), { self.relu_(); })
// Tanh approximation (CANN's API reference); torch_npu calls it for both values of gelu's
// `approximate`.
SHAPED(aclnnGelu, (Tensor self, Tensor out), SAME(out, self), { at::gelu_out(out, self, "tanh"); })
// 0 none, 1 tanh (op-plugin's GeluOutKernelNpuOpApi.cpp).
SHAPED(aclnnGeluV2, (Tensor self, int64_t approximate, Tensor out), SAME(out, self),
    { at::gelu_out(out, self, approximate ? "tanh" : "none"); })
// x * sigmoid(1.702 x): torch_npu's documentation of npu_fast_gelu.
SHAPED(aclnnFastGelu, (Tensor self, Tensor out), SAME(out, self),
    { out.copy_(self * at::sigmoid(self * 1.702)); })
OP(aclnnInplaceHardtanh, (Tensor self, Scalar min, Scalar max), { at::hardtanh_(self, min, max); })
OP(aclnnInplaceElu, (Tensor self, Scalar alpha, Scalar scale, Scalar input_scale),
    { at::elu_(self, alpha, scale, input_scale); })
OP(aclnnInplaceLeakyRelu, (Tensor self, Scalar slope), { at::leaky_relu_(self, slope); })

OP(aclnnAddRelu, (Tensor self, Tensor other, Scalar alpha, Tensor out),
    { out.copy_(at::relu(at::add(upcast(self), upcast(other), alpha))); })
OP(aclnnInplaceAddRelu, (Tensor self, Tensor other, Scalar alpha),
    { self.copy_(at::relu(at::add(upcast(self), upcast(other), alpha))); })
OP(aclnnInplaceCelu, (Tensor self, Scalar alpha), { self.copy_(at::celu(upcast(self), alpha)); })
OP(aclnnGlu, (Tensor self, int64_t dim, Tensor out), { out.copy_(at::glu(upcast(self), dim)); })
CHECKED(aclnnSoftshrink, (Tensor self, Scalar bound, Tensor out), {
  require(bound.toDouble() >= 0, "lambd is ", bound.toDouble(), "; it must not be negative");
  COMPUTE { out.copy_(at::softshrink(upcast(self), bound)); };
})
OP(aclnnThreshold, (Tensor self, Scalar threshold, Scalar value, Tensor out),
    { out.copy_(at::threshold(self, threshold, value)); })
OP(aclnnInplaceThreshold, (Tensor self, Scalar threshold, Scalar value),
    { at::threshold_(self, threshold, value); })
OP(aclnnPrelu, (Tensor self, Tensor weight, Tensor out), {
  auto slope = upcast(weight);
  if (slope.dim() == 1 && self.dim() > 1 && slope.numel() > 1) {
    Ints shape(self.dim(), 1);
    shape[1] = slope.numel();
    slope = slope.view(shape);
  }
  const auto x = upcast(self);
  out.copy_(at::where(x > 0, x, x * slope));
})

namespace {
using namespace emu;
// torch_npu's documentation of npu_scaled_masked_softmax; op-plugin's
// MaskedSoftMaxKernelNpuOpApi.cpp: four dimensions.
void check_masked(const Tensor& x, const Tensor& mask, bool fixed_triangle) {
  EXPANDS(x, mask);
  require(!fixed_triangle, "fixed_triu_mask is true; only false is supported");
}
}  // namespace
// Masked values count as -10000 (op-plugin's test_scaled_masked_softmax.py).
CHECKED(aclnnScaledMaskedSoftmax,
    (Tensor x, Tensor mask, double scale, bool fixed_triangle, Tensor out), {
      check_masked(x, mask, fixed_triangle);
      COMPUTE { out.copy_(at::softmax((upcast(x) * scale).masked_fill(mask, -10000), -1)); };
    })
CHECKED(aclnnScaledMaskedSoftmaxBackward,
    (Tensor grad, Tensor y, Tensor mask, double scale, bool fixed_triangle, Tensor out), {
      check_masked(y, mask, fixed_triangle);
      COMPUTE {
        const auto slopes =
            at::_softmax_backward_data(upcast(grad), upcast(y), -1, upcast(y).scalar_type());
        out.copy_((slopes * scale).masked_fill(mask, 0));
      };
    })
// x is [batch, windows, heads, tokens, tokens] (op-plugin's
// test_masked_softmax_with_rel_pos_bias.py).
CHECKED(aclnnMaskedSoftmaxWithRelPosBias,
    (Tensor x, Opt<Tensor> mask, Tensor bias, double scale, int64_t precision, Tensor out), {
      EXPANDS(x, bias);
      if (mask) expands("x, atten_mask", {x, *mask});
      require(scale == 1, "scale_value is ", scale,
          "; 1 is emulated: where it is applied is not documented");
      COMPUTE {
        auto scores = upcast(x) + upcast(bias);
        if (mask) scores = scores + upcast(*mask);
        out.copy_(at::softmax(scores, -1));
      };
    })
