// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Gradients of activations and softmax.
#include "ops/upcast.h"

using namespace emu;

#define GRADIENT(NAME, FUNCTION)                                    \
  OP(aclnn##NAME##Backward, (Tensor grad, Tensor self, Tensor out), \
      { out.copy_(at::FUNCTION##_backward(upcast(grad), upcast(self))); })

GRADIENT(Hardsigmoid, hardsigmoid)
GRADIENT(Hardswish, hardswish)  // op-plugin writes the gradients at -3 and 3 itself
OP(aclnnHardswishBackwardV2, (Tensor grad, Tensor self, Tensor out),
    { out.copy_(at::hardswish_backward(upcast(grad), upcast(self))); })
GRADIENT(Mish, mish)
GRADIENT(Sigmoid, sigmoid)
GRADIENT(Silu, silu)
GRADIENT(Tanh, tanh)

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
OP(aclnnGluBackward, (Tensor grad, Tensor self, int64_t dim, Tensor out),
    { out.copy_(at::glu_backward(upcast(grad), upcast(self), dim)); })
OP(aclnnHardshrinkBackward, (Tensor grad, Tensor self, Scalar bound, Tensor out),
    { out.copy_(at::hardshrink_backward(upcast(grad), upcast(self), bound)); })
OP(aclnnHardtanhBackward, (Tensor grad, Tensor self, Scalar min, Scalar max, Tensor out),
    { out.copy_(at::hardtanh_backward(upcast(grad), upcast(self), min, max)); })
OP(aclnnLeakyReluBackward, (Tensor grad, Tensor self, Scalar slope, bool is_result, Tensor out),
    { out.copy_(at::leaky_relu_backward(upcast(grad), upcast(self), slope, is_result)); })
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
      auto slope = upcast(weight);
      if (slope.dim() == 1 && self.dim() > 1) {
        Ints shape(self.dim(), 1);
        shape[1] = slope.numel();
        slope = slope.view(shape);
      }
      const auto g = upcast(grad);
      grad_self.copy_(at::where(negative, g * slope, g));
      grad_weight.copy_(at::sum_to(at::where(negative, g * upcast(self), 0), slope.sizes())
              .view(grad_weight.sizes()));
    })
OP(aclnnSoftplusBackward, (Tensor grad, Tensor self, Scalar beta, Scalar threshold, Tensor out),
    { out.copy_(at::softplus_backward(upcast(grad), upcast(self), beta, threshold)); })
OP(aclnnSoftshrinkBackward, (Tensor grad, Tensor self, Scalar bound, Tensor out),
    { out.copy_(at::softshrink_backward(upcast(grad), upcast(self), bound)); })
OP(aclnnThresholdBackward, (Tensor grad, Tensor self, Scalar threshold, Tensor out),
    { out.copy_(at::threshold_backward(upcast(grad), upcast(self), threshold)); })
OP(aclnnSoftmaxBackward, (Tensor grad, Tensor output, int64_t dim, Tensor out), {
  const auto y = upcast(output);
  out.copy_(at::_softmax_backward_data(upcast(grad).to(y.scalar_type()), y, dim, y.scalar_type()));
})
OP(aclnnLogSoftmaxBackward, (Tensor grad, Tensor output, int64_t dim, Tensor out), {
  const auto y = upcast(output);
  out.copy_(
      at::_log_softmax_backward_data(upcast(grad).to(y.scalar_type()), y, dim, y.scalar_type()));
})
