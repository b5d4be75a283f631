// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Pointwise operators of two tensors, or of a tensor and a scalar.
#include "families.h"

namespace {
void check_sum(const at::Tensor& self, const at::Tensor& other) {
  emu::rule("add.bfloat16-and-complex", [&] {
    for (const auto& [a, b] : {std::pair{&self, &other}, std::pair{&other, &self}})
      emu::require(a->scalar_type() != at::kBFloat16 || !b->is_complex(),
          "the dtypes are BFloat16 and ", b->scalar_type(), "; they do not go together");
  });
}

void check_value(const at::Tensor& self, const at::Scalar& value) {
  emu::rule("addcmul.value", self.is_complex() || !value.isComplex(), "value is complex and self ",
      self.scalar_type(), "; it must be real");
}
}  // namespace

SHAPED(aclnnAdd, (Tensor self, Tensor other, Scalar alpha, Tensor out),
    (check_sum(self, other), BROADCAST(out, self, other)),
    { at::add_out(out, self, other, alpha); })
SHAPED(aclnnSub, (Tensor self, Tensor other, Scalar alpha, Tensor out), BROADCAST(out, self, other),
    { at::sub_out(out, self, other, alpha); })

// number + alpha * tensor (op-plugin's AddKernelNpuOpApi.cpp).
SHAPED(aclnnAddV3, (Scalar self, Tensor other, Scalar alpha, Tensor out), SAME(out, other),
    { at::add_out(out, number(self), other, alpha); })
// An NPU takes int64 times a floating number, in torch.hann_window without a dtype (vllm-ascend,
// issue 11627). That the result is cut to an integer is not documented.
SHAPED(aclnnInplaceMuls, (Tensor self, Scalar other),
    (self.scalar_type() == at::kLong && other.isFloatingPoint() ? void() : fits(self, other)),
    { self.copy_(at::mul(self, number(other))); })
// A3 divides complex tensors only by real ones in PyTorch's tests: div and true_divide of complex
// dtypes fail, masked.mean and softsign pass (Ascend/pytorch, ci-test, skip_list.json at
// 52087f69e).
SHAPED(aclnnDiv, (Tensor self, Tensor other, Tensor out),
    (BROADCAST(out, self, other), require(!other.is_complex(), "other is ", other.scalar_type(),
                                      "; a real dtype is allowed")),
    { at::div_out(out, self, other); })
// In-place integer division truncates: torch_npu's ReduceOp.AVG uses it (ProcessGroupHCCL.cpp).
OP(aclnnInplaceDiv, (Tensor self, Tensor other), { self.copy_(at::div(self, other)); })
OP(aclnnInplaceDivs, (Tensor self, Scalar other), { self.copy_(at::div(self, number(other))); })
SHAPED(aclnnInplaceFloorDivides, (Tensor self, Scalar other), fits(self, other),
    { self.floor_divide_(number(other)); })
SHAPED(aclnnRsub, (Tensor self, Tensor other, Scalar alpha, Tensor out),
    BROADCAST(out, self, other), { at::sub_out(out, other, self, alpha); })
SHAPED(aclnnRsubs, (Tensor self, Scalar other, Scalar alpha, Tensor out), SAME(out, self),
    { at::sub_out(out, number(other), self, alpha); })

// Called for `number >= tensor`: tensor <= number (op-plugin's GeKernelNpuOpApi.cpp).
OP(aclnnLessScalar, (Tensor self, Scalar other, Tensor out), { at::le_out(out, self, other); })

OP(aclnnEqual, (Tensor self, Tensor other, Tensor out), { out.fill_(at::equal(self, other)); })
SHAPED(aclnnIsClose,
    (Tensor self, Tensor other, double relative, double absolute, bool equal_nan, Tensor out),
    BROADCAST(out, self, other),
    { out.copy_(at::isclose(self, other, relative, absolute, equal_nan)); })

// With a shift of another dtype than the values' an NPU ends with an AI CPU exception, 507018
// (triton-ascend, issue 472: int32 by int64).
SHAPED(aclnnLeftShift, (Tensor self, Tensor shift, Tensor out),
    (BROADCAST(out, self, shift), same_dtype("shift", shift, "self", self)),
    { at::bitwise_left_shift_out(out, self, shift); })
SHAPED(aclnnRightShift, (Tensor self, Tensor shift, Tensor out),
    (BROADCAST(out, self, shift), same_dtype("shift", shift, "self", self)),
    { at::bitwise_right_shift_out(out, self, shift); })

// Division with a rounding mode: 0 none, 1 "trunc", 2 "floor" (op-plugin's DivKernelNpuOpApi.cpp).
namespace {
std::optional<c10::string_view> rounding(int64_t mode) {
  switch (mode) {
    case 0: return std::nullopt;
    case 1: return "trunc";
    case 2: return "floor";
  }
  emu::raise(emu::kOpParam, {"rounding mode ", mode, "; supported: 0 none, 1 trunc and 2 floor"});
}
}  // namespace
SHAPED(aclnnDivMod, (Tensor self, Tensor other, int32_t mode, Tensor out),
    BROADCAST(out, self, other), { at::div_out(out, self, other, rounding(mode)); })
SHAPED(aclnnDivMods, (Tensor self, Scalar other, int32_t mode, Tensor out), SAME(out, self),
    { at::div_out(out, self, number(other), rounding(mode)); })
SHAPED(aclnnInplaceDivMod, (Tensor self, Tensor other, int32_t mode),
    (EXPANDS(self, other), fits(self, other)), { self.div_(other, rounding(mode)); })
SHAPED(aclnnInplaceDivMods, (Tensor self, Scalar other, int32_t mode), fits(self, other),
    { self.div_(number(other), rounding(mode)); })

SHAPED(aclnnPowScalarTensor, (Scalar self, Tensor exponent, Tensor out), SAME(out, exponent),
    { at::pow_out(out, self, exponent); })

SHAPED(aclnnRemainderScalarTensor, (Scalar self, Tensor other, Tensor out), SAME(out, other),
    { out.copy_(at::remainder(self, other)); })

OP(aclnnClampTensor, (Tensor self, Opt<Tensor> min, Opt<Tensor> max, Tensor out),
    { at::clamp_out(out, self, min, max); })

SHAPED(aclnnAddcmul, (Tensor self, Tensor a, Tensor b, Scalar value, Tensor out),
    (BROADCAST(out, self, a, b), check_value(out, value)),
    { at::addcmul_out(out, self, a, b, value); })
SHAPED(aclnnAddcdiv, (Tensor self, Tensor a, Tensor b, Scalar value, Tensor out),
    BROADCAST(out, self, a, b), { at::addcdiv_out(out, self, a, b, value); })
SHAPED(aclnnInplaceAddcmul, (Tensor self, Tensor a, Tensor b, Scalar value),
    (EXPANDS(self, a, b), check_value(self, value)), { self.addcmul_(a, b, value); })
SHAPED(aclnnInplaceAddcdiv, (Tensor self, Tensor a, Tensor b, Scalar value), EXPANDS(self, a, b),
    { self.addcdiv_(a, b, value); })
SHAPED(aclnnLerp, (Tensor self, Tensor end, Tensor weight, Tensor out),
    BROADCAST(out, self, end, weight), { at::lerp_out(out, self, end, weight); })
SHAPED(aclnnInplaceLerp, (Tensor self, Tensor end, Tensor weight), EXPANDS(self, end, weight),
    { self.lerp_(end, weight); })
SHAPED(aclnnInplaceLerps, (Tensor self, Tensor end, Scalar weight), EXPANDS(self, end),
    { self.lerp_(end, weight); })
SHAPED(aclnnLerps, (Tensor self, Tensor end, Scalar weight, Tensor out), BROADCAST(out, self, end),
    { at::lerp_out(out, self, end, weight); })

SHAPED(aclnnSWhere, (Tensor condition, Tensor self, Tensor other, Tensor out),
    BROADCAST(out, condition, self, other), { at::where_out(out, condition, self, other); })

OP(aclnnComplex, (Tensor real, Tensor imaginary, Tensor out),
    { out.copy_(at::complex(real, imaginary)); })
OP(aclnnPolar, (Tensor length, Tensor angle, Tensor out), { out.copy_(at::polar(length, angle)); })
OP(aclnnGcd, (Tensor self, Tensor other, Tensor out), { out.copy_(at::gcd(self, other)); })
OP(aclnnXLogYScalarSelf, (Scalar self, Tensor other, Tensor out),
    { out.copy_(at::xlogy(self, upcast(other))); })
OP(aclnnInplaceXLogYScalarOther, (Tensor self, Scalar other),
    { self.copy_(at::xlogy(upcast(self), other)); })
OP(aclnnMaskedScale, (Tensor self, Tensor mask, double scale, Tensor out),
    { out.copy_(upcast(self) * mask * scale); })
OP(aclnnIsInTensorScalar, (Tensor elements, Scalar tested, bool unique, bool invert, Tensor out),
    { out.copy_(at::isin(elements, tested, unique, invert)); })
OP(aclnnIsInScalarTensor, (Scalar element, Tensor tested, bool unique, bool invert, Tensor out),
    { out.copy_(at::isin(element, tested, unique, invert)); })
