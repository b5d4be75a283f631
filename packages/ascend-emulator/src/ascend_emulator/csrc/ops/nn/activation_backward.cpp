// Gradients of activations and softmax.
#include "ops/wide.h"

using namespace emu;

#define GRADIENT(NAME, FUNCTION)                                    \
  OP(aclnn##NAME##Backward, (Tensor grad, Tensor self, Tensor out), \
      { out.copy_(at::FUNCTION##_backward(wide(grad), wide(self))); })

GRADIENT(Hardsigmoid, hardsigmoid)
OP(aclnnHardswishBackwardV2, (Tensor grad, Tensor self, Tensor out),
    { out.copy_(at::hardswish_backward(wide(grad), wide(self))); })
GRADIENT(Mish, mish)
GRADIENT(Sigmoid, sigmoid)
GRADIENT(Silu, silu)
GRADIENT(Tanh, tanh)

// As aclnnGelu, the approximation by tanh.
OP(aclnnGeluBackward, (Tensor grad, Tensor self, Tensor out), { out.copy_(at::gelu_backward(wide(grad), wide(self), "tanh")); })
OP(aclnnGeluBackwardV2, (Tensor grad, Tensor self, Text approximate, Tensor out),
    { out.copy_(at::gelu_backward(wide(grad), wide(self), approximate)); })
OP(aclnnFastGeluBackward, (Tensor grad, Tensor self, Tensor out), {
  const auto x = wide(self) * 1.702;
  const auto gate = at::sigmoid(x);
  out.copy_(wide(grad) * gate * (1 + x * (1 - gate)));
})
OP(aclnnEluBackward, (Tensor grad, Scalar alpha, Scalar scale, Scalar input_scale, bool is_result, Tensor self, Tensor out),
    { out.copy_(at::elu_backward(wide(grad), alpha, scale, input_scale, is_result, wide(self))); })
OP(aclnnGluBackward, (Tensor grad, Tensor self, int64_t dim, Tensor out),
    { out.copy_(at::glu_backward(wide(grad), wide(self), dim)); })
OP(aclnnHardshrinkBackward, (Tensor grad, Tensor self, Scalar bound, Tensor out),
    { out.copy_(at::hardshrink_backward(wide(grad), wide(self), bound)); })
OP(aclnnHardtanhBackward, (Tensor grad, Tensor self, Scalar min, Scalar max, Tensor out),
    { out.copy_(at::hardtanh_backward(wide(grad), wide(self), min, max)); })
OP(aclnnLeakyReluBackward, (Tensor grad, Tensor self, Scalar slope, bool is_result, Tensor out),
    { out.copy_(at::leaky_relu_backward(wide(grad), wide(self), slope, is_result)); })
// The buffer is the NPU's own, and without use here.
OP(aclnnLogSigmoidForward, (Tensor self, Tensor out, Tensor buffer), {
  out.copy_(at::log_sigmoid(wide(self)));
  buffer.zero_();
})
OP(aclnnLogSigmoidBackward, (Tensor grad, Tensor self, Opt<Tensor>, Tensor out),
    { out.copy_(wide(grad) * at::sigmoid(-wide(self))); })
OP(aclnnLogitGrad, (Tensor self, Tensor grad, double epsilon, Tensor out),
    { out.copy_(at::logit_backward(wide(grad), wide(self), epsilon < 0 ? std::nullopt : Opt<double>(epsilon))); })
OP(aclnnPreluBackward, (Tensor grad, Tensor self, Tensor weight, Tensor grad_self, Tensor grad_weight), {
  const auto negative = wide(self) < 0;
  auto slope = wide(weight);
  if (slope.dim() == 1 && self.dim() > 1) {
    Ints shape(self.dim(), 1);
    shape[1] = slope.numel();
    slope = slope.view(shape);
  }
  const auto g = wide(grad);
  grad_self.copy_(at::where(negative, g * slope, g));
  grad_weight.copy_(at::sum_to(at::where(negative, g * wide(self), 0), slope.sizes()).view(grad_weight.sizes()));
})
OP(aclnnSoftplusBackward, (Tensor grad, Tensor self, Scalar beta, Scalar threshold, Tensor out),
    { out.copy_(at::softplus_backward(wide(grad), wide(self), beta, threshold)); })
OP(aclnnSoftshrinkBackward, (Tensor grad, Tensor self, Scalar bound, Tensor out),
    { out.copy_(at::softshrink_backward(wide(grad), wide(self), bound)); })
OP(aclnnThresholdBackward, (Tensor grad, Tensor self, Scalar threshold, Tensor out),
    { out.copy_(at::threshold_backward(wide(grad), wide(self), threshold)); })
OP(aclnnSoftmaxBackward, (Tensor grad, Tensor output, int64_t dim, Tensor out), {
  const auto y = wide(output);
  out.copy_(at::_softmax_backward_data(wide(grad).to(y.scalar_type()), y, dim, y.scalar_type()));
})
OP(aclnnLogSoftmaxBackward, (Tensor grad, Tensor output, int64_t dim, Tensor out), {
  const auto y = wide(output);
  out.copy_(at::_log_softmax_backward_data(wide(grad).to(y.scalar_type()), y, dim, y.scalar_type()));
})
