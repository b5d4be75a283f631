// Further pointwise operators and activations; half types in float32.
#include "ops/wide.h"

using namespace emu;

OP(aclnnAddRelu, (Tensor self, Tensor other, Scalar alpha, Tensor out), { out.copy_(at::relu(at::add(wide(self), wide(other), alpha))); })
OP(aclnnInplaceAddRelu, (Tensor self, Tensor other, Scalar alpha), { self.copy_(at::relu(at::add(wide(self), wide(other), alpha))); })
OP(aclnnAngleV2, (Tensor self, Tensor out), { out.copy_(at::angle(wide(self))); })
OP(aclnnCelu, (Tensor self, Scalar alpha, Tensor out), { out.copy_(at::celu(wide(self), alpha)); })
OP(aclnnInplaceCelu, (Tensor self, Scalar alpha), { self.copy_(at::celu(wide(self), alpha)); })
OP(aclnnComplex, (Tensor real, Tensor imaginary, Tensor out), { out.copy_(at::complex(real, imaginary)); })
OP(aclnnPolar, (Tensor length, Tensor angle, Tensor out), { out.copy_(at::polar(length, angle)); })
OP(aclnnGcd, (Tensor self, Tensor other, Tensor out), { out.copy_(at::gcd(self, other)); })
OP(aclnnGlu, (Tensor self, int64_t dim, Tensor out), { out.copy_(at::glu(wide(self), dim)); })
OP(aclnnHardshrink, (Tensor self, Scalar bound, Tensor out), { out.copy_(at::hardshrink(wide(self), bound)); })
CHECKED(aclnnSoftshrink, (Tensor self, Scalar bound, Tensor out), {
  check(bound.toDouble() >= 0, kOpParam, "lambd is ", bound.toDouble(), "; it must not be negative");
  COMPUTE { out.copy_(at::softshrink(wide(self), bound)); };
})
OP(aclnnThreshold, (Tensor self, Scalar threshold, Scalar value, Tensor out), { out.copy_(at::threshold(self, threshold, value)); })
OP(aclnnInplaceThreshold, (Tensor self, Scalar threshold, Scalar value), { at::threshold_(self, threshold, value); })
OP(aclnnLogAddExp, (Tensor self, Tensor other, Tensor out), { out.copy_(at::logaddexp(wide(self), wide(other))); })
OP(aclnnLogAddExp2, (Tensor self, Tensor other, Tensor out), { out.copy_(at::logaddexp2(wide(self), wide(other))); })
// A negative bound is none (op-plugin's LogitKernelNpuOpApi.cpp).
OP(aclnnLogit, (Tensor self, double epsilon, Tensor out), {
  out.copy_(at::logit(wide(self), epsilon < 0 ? std::nullopt : Opt<double>(epsilon)));
})
OP(aclnnXLogYTensor, (Tensor self, Tensor other, Tensor out), { out.copy_(at::xlogy(wide(self), wide(other))); })
OP(aclnnXLogYScalarOther, (Tensor self, Scalar other, Tensor out), { out.copy_(at::xlogy(wide(self), other)); })
OP(aclnnXLogYScalarSelf, (Scalar self, Tensor other, Tensor out), { out.copy_(at::xlogy(self, wide(other))); })
OP(aclnnInplaceXLogYScalarOther, (Tensor self, Scalar other), { self.copy_(at::xlogy(wide(self), other)); })
OP(aclnnMaskedScale, (Tensor self, Tensor mask, double scale, Tensor out), { out.copy_(wide(self) * mask * scale); })
OP(aclnnPrelu, (Tensor self, Tensor weight, Tensor out), {
  auto slope = wide(weight);
  if (slope.dim() == 1 && self.dim() > 1 && slope.numel() > 1) {
    Ints shape(self.dim(), 1);
    shape[1] = slope.numel();
    slope = slope.view(shape);
  }
  const auto x = wide(self);
  out.copy_(at::where(x > 0, x, x * slope));
})
OP(aclnnIsInTensorScalar, (Tensor elements, Scalar tested, bool unique, bool invert, Tensor out), { out.copy_(at::isin(elements, tested, unique, invert)); })
OP(aclnnIsInScalarTensor, (Scalar element, Tensor tested, bool unique, bool invert, Tensor out), { out.copy_(at::isin(element, tested, unique, invert)); })
OP(aclnnLogSpace, (Scalar start, Scalar end, int64_t steps, double base, Tensor out), {
  out.copy_(at::logspace(start, end, steps, base, out.is_floating_point() ? at::kDouble : out.scalar_type()));
})
OP(aclnnChannelShuffle, (Tensor self, int64_t groups, Tensor out), { out.copy_(at::channel_shuffle(self, groups)); })
