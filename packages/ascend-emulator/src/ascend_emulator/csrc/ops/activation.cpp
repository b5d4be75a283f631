// Activations and softmax.
#include "../core/op.h"

#define ACTIVATION(NAME, FUNCTION) OP(aclnn##NAME, (Tensor self, Tensor out), { at::FUNCTION##_out(out, self); })

ACTIVATION(Sigmoid, sigmoid)
ACTIVATION(Silu, silu)
ACTIVATION(Tanh, tanh)
ACTIVATION(Mish, mish)
ACTIVATION(Hardswish, hardswish)
OP(aclnnInplaceMish, (Tensor self), { at::mish_(self); })
OP(aclnnInplaceHardswish, (Tensor self), { at::hardswish_(self); })
// Of whole numbers too (op-plugin's test_hardsigmoid.py).
OP(aclnnHardsigmoid, (Tensor self, Tensor out), { out.copy_(at::hardsigmoid(self.is_floating_point() ? self : self.to(at::kFloat))); })
OP(aclnnInplaceHardsigmoid, (Tensor self), { self.copy_(at::hardsigmoid(self.is_floating_point() ? self : self.to(at::kFloat))); })
OP(aclnnRelu, (Tensor self, Tensor out), { out.copy_(at::relu(self)); })
OP(aclnnInplaceRelu, (Tensor self), { self.relu_(); })
OP(aclnnInplaceSigmoid, (Tensor self), { self.sigmoid_(); })
OP(aclnnInplaceTanh, (Tensor self), { self.tanh_(); })
// The approximation by tanh, by CANN's API reference, and what torch_npu calls for either argument of torch.nn.functional.gelu.
OP(aclnnGelu, (Tensor self, Tensor out), { at::gelu_out(out, self, "tanh"); })
// 0 none, 1 tanh (op-plugin's GeluOutKernelNpuOpApi.cpp).
OP(aclnnGeluV2, (Tensor self, int64_t approximate, Tensor out), { at::gelu_out(out, self, approximate ? "tanh" : "none"); })
// x * sigmoid(1.702 x): torch_npu's documentation of npu_fast_gelu.
OP(aclnnFastGelu, (Tensor self, Tensor out), { out.copy_(self * at::sigmoid(self * 1.702)); })
OP(aclnnHardtanh, (Tensor self, Scalar min, Scalar max, Tensor out), { at::hardtanh_out(out, self, min, max); })
OP(aclnnInplaceHardtanh, (Tensor self, Scalar min, Scalar max), { at::hardtanh_(self, min, max); })
OP(aclnnSoftplus, (Tensor self, Scalar beta, Scalar threshold, Tensor out), { at::softplus_out(out, self, beta, threshold); })
OP(aclnnElu, (Tensor self, Scalar alpha, Scalar scale, Scalar input_scale, Tensor out), { at::elu_out(out, self, alpha, scale, input_scale); })
OP(aclnnInplaceElu, (Tensor self, Scalar alpha, Scalar scale, Scalar input_scale), { at::elu_(self, alpha, scale, input_scale); })
OP(aclnnInplaceLeakyRelu, (Tensor self, Scalar slope), { at::leaky_relu_(self, slope); })
OP(aclnnLeakyRelu, (Tensor self, Scalar slope, Tensor out), { at::leaky_relu_out(out, self, slope); })
OP(aclnnSoftmax, (Tensor self, int64_t dim, Tensor out), { at::softmax_out(out, self, dim, out.scalar_type()); })
OP(aclnnLogSoftmax, (Tensor self, int64_t dim, Tensor out), { at::log_softmax_out(out, self, dim, out.scalar_type()); })
