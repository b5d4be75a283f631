// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Gradients of activations and softmax.
#include "ops/upcast.h"

using namespace emu;

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
