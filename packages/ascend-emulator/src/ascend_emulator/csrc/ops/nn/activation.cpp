// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Activations, softmax, and their gradients.
#include "operator/shapes.h"
#include "ops/upcast.h"

namespace {
using namespace emu;
// PReLU's slopes; several are those of the channels.
Tensor slopes_of(const Tensor& weight, const Tensor& self) {
  if (weight.dim() != 1 || self.dim() < 2) return upcast(weight);
  Ints shape(self.dim(), 1);
  shape[1] = weight.numel();
  return upcast(weight).view(shape);
}
}  // namespace

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
  const auto x = upcast(self);
  out.copy_(at::where(x > 0, x, x * slopes_of(weight, self)));
})

namespace {
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

// Tanh approximation, as aclnnGelu.
OP(aclnnGeluBackward, (Tensor grad, Tensor self, Tensor out),
    { out.copy_(at::gelu_backward(upcast(grad), upcast(self), "tanh")); })
OP(aclnnGeluBackwardV2, (Tensor grad, Tensor self, Text approximate, Tensor out),
    { out.copy_(at::gelu_backward(upcast(grad), upcast(self), approximate)); })
OP(aclnnFastGeluBackward, (Tensor grad, Tensor self, Tensor out), {
  const auto x = upcast(self) * 1.702;
  const auto gate = at::sigmoid(x);
  out.copy_(upcast(grad) * gate * (1 + x * (1 - gate)));
})
OP(aclnnEluBackward,
    (Tensor grad, Scalar alpha, Scalar scale, Scalar input_scale, bool is_result, Tensor self,
        Tensor out),
    {
      out.copy_(at::elu_backward(upcast(grad), alpha, scale, input_scale, is_result, upcast(self)));
    })
// The buffer's layout is undocumented; it is not used.
OP(aclnnLogSigmoidForward, (Tensor self, Tensor out, Tensor buffer), {
  out.copy_(at::log_sigmoid(upcast(self)));
  buffer.zero_();
})
OP(aclnnLogSigmoidBackward, (Tensor grad, Tensor self, Opt<Tensor>, Tensor out),
    { out.copy_(upcast(grad) * at::sigmoid(-upcast(self))); })
OP(aclnnLogitGrad, (Tensor self, Tensor grad, double epsilon, Tensor out), {
  out.copy_(at::logit_backward(
      upcast(grad), upcast(self), epsilon < 0 ? std::nullopt : Opt<double>(epsilon)));
})
OP(aclnnPreluBackward,
    (Tensor grad, Tensor self, Tensor weight, Tensor grad_self, Tensor grad_weight), {
      const auto negative = upcast(self) < 0;
      const auto slope = slopes_of(weight, self), g = upcast(grad);
      grad_self.copy_(at::where(negative, g * slope, g));
      grad_weight.copy_(at::sum_to(at::where(negative, g * upcast(self), 0), slope.sizes())
              .view(grad_weight.sizes()));
    })
