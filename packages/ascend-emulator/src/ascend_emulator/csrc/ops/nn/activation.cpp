// Activations and softmax.
#include "operator/shapes.h"
#include "ops/upcast.h"

#define ACTIVATION(NAME, FUNCTION) \
  SHAPED(aclnn##NAME, (Tensor self, Tensor out), SAME(out, self), { at::FUNCTION##_out(out, self); })

ACTIVATION(Sigmoid, sigmoid)
ACTIVATION(Silu, silu)
ACTIVATION(Tanh, tanh)
ACTIVATION(Mish, mish)
ACTIVATION(Hardswish, hardswish)
OP(aclnnInplaceMish, (Tensor self), { at::mish_(self); })
OP(aclnnInplaceHardswish, (Tensor self), { at::hardswish_(self); })
// Also for integers (op-plugin's test_hardsigmoid.py).
SHAPED(aclnnHardsigmoid, (Tensor self, Tensor out), SAME(out, self),
    { out.copy_(at::hardsigmoid(self.is_floating_point() ? self : self.to(at::kFloat))); })
OP(aclnnInplaceHardsigmoid, (Tensor self),
    { self.copy_(at::hardsigmoid(self.is_floating_point() ? self : self.to(at::kFloat))); })
SHAPED(aclnnRelu, (Tensor self, Tensor out), SAME(out, self), { out.copy_(at::relu(self)); })
OP(aclnnInplaceRelu, (Tensor self), { self.relu_(); })
OP(aclnnInplaceSigmoid, (Tensor self), { self.sigmoid_(); })
OP(aclnnInplaceTanh, (Tensor self), { self.tanh_(); })
// Tanh approximation (CANN's API reference); torch_npu calls it for both values of gelu's `approximate`.
SHAPED(aclnnGelu, (Tensor self, Tensor out), SAME(out, self), { at::gelu_out(out, self, "tanh"); })
// 0 none, 1 tanh (op-plugin's GeluOutKernelNpuOpApi.cpp).
SHAPED(aclnnGeluV2, (Tensor self, int64_t approximate, Tensor out), SAME(out, self),
    { at::gelu_out(out, self, approximate ? "tanh" : "none"); })
// x * sigmoid(1.702 x): torch_npu's documentation of npu_fast_gelu.
SHAPED(aclnnFastGelu, (Tensor self, Tensor out), SAME(out, self), { out.copy_(self * at::sigmoid(self * 1.702)); })
SHAPED(
    aclnnHardtanh, (Tensor self, Scalar min, Scalar max, Tensor out), SAME(out, self), { at::hardtanh_out(out, self, min, max); })
OP(aclnnInplaceHardtanh, (Tensor self, Scalar min, Scalar max), { at::hardtanh_(self, min, max); })
SHAPED(aclnnSoftplus, (Tensor self, Scalar beta, Scalar threshold, Tensor out), SAME(out, self),
    { at::softplus_out(out, self, beta, threshold); })
SHAPED(aclnnElu, (Tensor self, Scalar alpha, Scalar scale, Scalar input_scale, Tensor out), SAME(out, self),
    { at::elu_out(out, self, alpha, scale, input_scale); })
OP(aclnnInplaceElu, (Tensor self, Scalar alpha, Scalar scale, Scalar input_scale), { at::elu_(self, alpha, scale, input_scale); })
OP(aclnnInplaceLeakyRelu, (Tensor self, Scalar slope), { at::leaky_relu_(self, slope); })
SHAPED(aclnnLeakyRelu, (Tensor self, Scalar slope, Tensor out), SAME(out, self), { at::leaky_relu_out(out, self, slope); })
SHAPED(aclnnSoftmax, (Tensor self, int64_t dim, Tensor out), ALONG(out, self, dim),
    { at::softmax_out(out, self, dim, out.scalar_type()); })
SHAPED(aclnnLogSoftmax, (Tensor self, int64_t dim, Tensor out), ALONG(out, self, dim),
    { at::log_softmax_out(out, self, dim, out.scalar_type()); })

OP(aclnnAddRelu, (Tensor self, Tensor other, Scalar alpha, Tensor out),
    { out.copy_(at::relu(at::add(upcast(self), upcast(other), alpha))); })
OP(aclnnInplaceAddRelu, (Tensor self, Tensor other, Scalar alpha),
    { self.copy_(at::relu(at::add(upcast(self), upcast(other), alpha))); })
OP(aclnnCelu, (Tensor self, Scalar alpha, Tensor out), { out.copy_(at::celu(upcast(self), alpha)); })
OP(aclnnInplaceCelu, (Tensor self, Scalar alpha), { self.copy_(at::celu(upcast(self), alpha)); })
OP(aclnnGlu, (Tensor self, int64_t dim, Tensor out), { out.copy_(at::glu(upcast(self), dim)); })
OP(aclnnHardshrink, (Tensor self, Scalar bound, Tensor out), { out.copy_(at::hardshrink(upcast(self), bound)); })
CHECKED(aclnnSoftshrink, (Tensor self, Scalar bound, Tensor out), {
  check(bound.toDouble() >= 0, kOpParam, "lambd is ", bound.toDouble(), "; it must not be negative");
  COMPUTE { out.copy_(at::softshrink(upcast(self), bound)); };
})
OP(aclnnThreshold, (Tensor self, Scalar threshold, Scalar value, Tensor out),
    { out.copy_(at::threshold(self, threshold, value)); })
OP(aclnnInplaceThreshold, (Tensor self, Scalar threshold, Scalar value), { at::threshold_(self, threshold, value); })
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
