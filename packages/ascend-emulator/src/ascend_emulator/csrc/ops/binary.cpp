// Pointwise operators of two tensors, or of a tensor and a scalar.
#include <ATen/ScalarOps.h>

#include "../core/op.h"

namespace {
// A scalar that takes part in type promotion as a Python number does.
at::Tensor number(const at::Scalar& value) { return at::native::wrapped_scalar_tensor(value); }
// What torch's in-place functions demand, at the call (op-plugin's test_divide.py, test_add.py).
template <class Other>
void castable(const at::Tensor& self, const Other& other) {
  const auto type = at::result_type(self, other);
  emu::check(at::canCast(type, self.scalar_type()), emu::kOpParam, "result type ", type, " can't be cast to the desired output type ", self.scalar_type());
}
}  // namespace

// Tensor-tensor and tensor-scalar forms, each with its in-place twin.
#define ARITHMETIC(NAME, FUNCTION)                                                                              \
  OP(aclnn##NAME, (Tensor self, Tensor other, Tensor out), { at::FUNCTION##_out(out, self, other); })           \
  OP(aclnn##NAME##s, (Tensor self, Scalar other, Tensor out), { at::FUNCTION##_out(out, self, number(other)); }) \
  CHECKED(aclnnInplace##NAME, (Tensor self, Tensor other), {                                                    \
    castable(self, other);                                                                                      \
    COMPUTE { self.FUNCTION##_(other); };                                                                       \
  })                                                                                                            \
  CHECKED(aclnnInplace##NAME##s, (Tensor self, Scalar other), {                                                 \
    castable(self, other);                                                                                      \
    COMPUTE { self.FUNCTION##_(number(other)); };                                                               \
  })

#define SCALED(NAME, FUNCTION)                                                                                                \
  OP(aclnn##NAME, (Tensor self, Tensor other, Scalar alpha, Tensor out), { at::FUNCTION##_out(out, self, other, alpha); })    \
  OP(aclnn##NAME##s, (Tensor self, Scalar other, Scalar alpha, Tensor out), { at::FUNCTION##_out(out, self, number(other), alpha); }) \
  CHECKED(aclnnInplace##NAME, (Tensor self, Tensor other, Scalar alpha), {                                                    \
    castable(self, other);                                                                                                    \
    COMPUTE { self.FUNCTION##_(other, alpha); };                                                                              \
  })                                                                                                                          \
  CHECKED(aclnnInplace##NAME##s, (Tensor self, Scalar other, Scalar alpha), {                                                 \
    castable(self, other);                                                                                                    \
    COMPUTE { self.FUNCTION##_(number(other), alpha); };                                                                      \
  })

#define COMPARE(NAME, FUNCTION)                                                                             \
  OP(aclnn##NAME##Tensor, (Tensor self, Tensor other, Tensor out), { at::FUNCTION##_out(out, self, other); }) \
  OP(aclnn##NAME##Scalar, (Tensor self, Scalar other, Tensor out), { at::FUNCTION##_out(out, self, other); }) \
  OP(aclnnInplace##NAME##Tensor, (Tensor self, Tensor other), { self.FUNCTION##_(other); })                 \
  OP(aclnnInplace##NAME##Scalar, (Tensor self, Scalar other), { self.FUNCTION##_(other); })

#define BITWISE(NAME, FUNCTION)                                                                               \
  OP(aclnn##NAME##Tensor, (Tensor self, Tensor other, Tensor out), { at::FUNCTION##_out(out, self, other); }) \
  OP(aclnn##NAME##Scalar, (Tensor self, Scalar other, Tensor out), { at::FUNCTION##_out(out, self, number(other)); })

#define BITWISE_BOTH(NAME, FUNCTION)                                                        \
  BITWISE(NAME, FUNCTION)                                                                   \
  OP(aclnnInplace##NAME##Tensor, (Tensor self, Tensor other), { self.FUNCTION##_(other); }) \
  OP(aclnnInplace##NAME##Scalar, (Tensor self, Scalar other), { self.FUNCTION##_(number(other)); })

#define LOGICAL(NAME, FUNCTION) OP(aclnn##NAME, (Tensor self, Tensor other, Tensor out), { at::FUNCTION##_out(out, self, other); })

#define LOGICAL_BOTH(NAME, FUNCTION) \
  LOGICAL(NAME, FUNCTION)            \
  OP(aclnnInplace##NAME, (Tensor self, Tensor other), { self.FUNCTION##_(other); })

SCALED(Add, add)
SCALED(Sub, sub)
ARITHMETIC(Mul, mul)
OP(aclnnDiv, (Tensor self, Tensor other, Tensor out), { at::div_out(out, self, other); })
OP(aclnnDivs, (Tensor self, Scalar other, Tensor out), { at::div_out(out, self, number(other)); })
// In place, integers take the quotient without its fraction: torch_npu's ReduceOp.AVG divides them so (ProcessGroupHCCL.cpp).
OP(aclnnInplaceDiv, (Tensor self, Tensor other), { self.copy_(at::div(self, other)); })
OP(aclnnInplaceDivs, (Tensor self, Scalar other), { self.copy_(at::div(self, number(other))); })
ARITHMETIC(FloorDivide, floor_divide)
OP(aclnnRsub, (Tensor self, Tensor other, Scalar alpha, Tensor out), { at::sub_out(out, other, self, alpha); })
OP(aclnnRsubs, (Tensor self, Scalar other, Scalar alpha, Tensor out), { at::sub_out(out, number(other), self, alpha); })

COMPARE(Eq, eq)
COMPARE(Ne, ne)
COMPARE(Lt, lt)
COMPARE(Le, le)
COMPARE(Gt, gt)
COMPARE(Ge, ge)
// What torch_npu asks for at `number >= tensor`: the tensor is no larger (op-plugin's GeKernelNpuOpApi.cpp).
OP(aclnnLessScalar, (Tensor self, Scalar other, Tensor out), { at::le_out(out, self, other); })

OP(aclnnEqual, (Tensor self, Tensor other, Tensor out), { out.fill_(at::equal(self, other)); })
OP(aclnnIsClose, (Tensor self, Tensor other, double relative, double absolute, bool equal_nan, Tensor out), {
  out.copy_(at::isclose(self, other, relative, absolute, equal_nan));
})

BITWISE_BOTH(BitwiseAnd, bitwise_and)
BITWISE(BitwiseOr, bitwise_or)
BITWISE_BOTH(BitwiseXor, bitwise_xor)
OP(aclnnLeftShift, (Tensor self, Tensor shift, Tensor out), { at::bitwise_left_shift_out(out, self, shift); })
OP(aclnnLeftShifts, (Tensor self, Scalar shift, Tensor out), { at::bitwise_left_shift_out(out, self, number(shift)); })
OP(aclnnRightShift, (Tensor self, Tensor shift, Tensor out), { at::bitwise_right_shift_out(out, self, shift); })

LOGICAL_BOTH(LogicalAnd, logical_and)
LOGICAL_BOTH(LogicalOr, logical_or)
LOGICAL(LogicalXor, logical_xor)

// Division with a rounding mode: 0 none, 1 "trunc", 2 "floor" (op-plugin's DivKernelNpuOpApi.cpp).
namespace {
std::optional<c10::string_view> rounding(int64_t mode) {
  switch (mode) {
    case 0: return std::nullopt;
    case 1: return "trunc";
    case 2: return "floor";
  }
  throw emu::Error(emu::kOpParam, emu::text("rounding mode ", mode, "; 0 none, 1 trunc and 2 floor are there"));
}
}  // namespace
OP(aclnnDivMod, (Tensor self, Tensor other, int32_t mode, Tensor out), { at::div_out(out, self, other, rounding(mode)); })
OP(aclnnDivMods, (Tensor self, Scalar other, int32_t mode, Tensor out), { at::div_out(out, self, number(other), rounding(mode)); })
CHECKED(aclnnInplaceDivMod, (Tensor self, Tensor other, int32_t mode), {
  castable(self, other);
  COMPUTE { self.div_(other, rounding(mode)); };
})
CHECKED(aclnnInplaceDivMods, (Tensor self, Scalar other, int32_t mode), {
  castable(self, other);
  COMPUTE { self.div_(number(other), rounding(mode)); };
})

OP(aclnnPowTensorScalar, (Tensor self, Scalar exponent, Tensor out), { at::pow_out(out, self, exponent); })
OP(aclnnPowTensorTensor, (Tensor self, Tensor exponent, Tensor out), { at::pow_out(out, self, exponent); })
OP(aclnnPowScalarTensor, (Scalar self, Tensor exponent, Tensor out), { at::pow_out(out, self, exponent); })
OP(aclnnInplacePowTensorScalar, (Tensor self, Scalar exponent), { self.pow_(exponent); })
OP(aclnnInplacePowTensorTensor, (Tensor self, Tensor exponent), { self.pow_(exponent); })

OP(aclnnRemainderTensorScalar, (Tensor self, Scalar other, Tensor out), { at::remainder_out(out, self, other); })
OP(aclnnRemainderTensorTensor, (Tensor self, Tensor other, Tensor out), { at::remainder_out(out, self, other); })
OP(aclnnRemainderScalarTensor, (Scalar self, Tensor other, Tensor out), { out.copy_(at::remainder(self, other)); })
OP(aclnnInplaceRemainderTensorScalar, (Tensor self, Scalar other), { self.remainder_(other); })
OP(aclnnInplaceRemainderTensorTensor, (Tensor self, Tensor other), { self.remainder_(other); })
OP(aclnnFmodScalar, (Tensor self, Scalar other, Tensor out), { at::fmod_out(out, self, other); })
OP(aclnnFmodTensor, (Tensor self, Tensor other, Tensor out), { at::fmod_out(out, self, other); })

OP(aclnnInplaceFmodScalar, (Tensor self, Scalar other), { self.fmod_(other); })
OP(aclnnInplaceFmodTensor, (Tensor self, Tensor other), { self.fmod_(other); })

OP(aclnnMaximum, (Tensor self, Tensor other, Tensor out), { at::maximum_out(out, self, other); })
OP(aclnnMinimum, (Tensor self, Tensor other, Tensor out), { at::minimum_out(out, self, other); })
OP(aclnnAtan2, (Tensor self, Tensor other, Tensor out), { at::atan2_out(out, self, other); })
OP(aclnnInplaceAtan2, (Tensor self, Tensor other), { self.atan2_(other); })

OP(aclnnClamp, (Tensor self, Opt<Scalar> min, Opt<Scalar> max, Tensor out), { at::clamp_out(out, self, min, max); })
OP(aclnnClampTensor, (Tensor self, Opt<Tensor> min, Opt<Tensor> max, Tensor out), { at::clamp_out(out, self, min, max); })
OP(aclnnClampMin, (Tensor self, Scalar min, Tensor out), { at::clamp_min_out(out, self, min); })
OP(aclnnClampMax, (Tensor self, Scalar max, Tensor out), { at::clamp_max_out(out, self, max); })
OP(aclnnClampMinTensor, (Tensor self, Tensor min, Tensor out), { at::clamp_min_out(out, self, min); })
OP(aclnnClampMaxTensor, (Tensor self, Tensor max, Tensor out), { at::clamp_max_out(out, self, max); })
OP(aclnnInplaceClampMax, (Tensor self, Scalar max), { self.clamp_max_(max); })
OP(aclnnInplaceClampMaxTensor, (Tensor self, Tensor max), { self.clamp_max_(max); })
OP(aclnnInplaceClampMinTensor, (Tensor self, Tensor min), { self.clamp_min_(min); })

OP(aclnnAddcmul, (Tensor self, Tensor a, Tensor b, Scalar value, Tensor out), { at::addcmul_out(out, self, a, b, value); })
OP(aclnnAddcdiv, (Tensor self, Tensor a, Tensor b, Scalar value, Tensor out), { at::addcdiv_out(out, self, a, b, value); })
OP(aclnnInplaceAddcmul, (Tensor self, Tensor a, Tensor b, Scalar value), { self.addcmul_(a, b, value); })
OP(aclnnInplaceAddcdiv, (Tensor self, Tensor a, Tensor b, Scalar value), { self.addcdiv_(a, b, value); })
OP(aclnnLerp, (Tensor self, Tensor end, Tensor weight, Tensor out), { at::lerp_out(out, self, end, weight); })
OP(aclnnInplaceLerp, (Tensor self, Tensor end, Tensor weight), { self.lerp_(end, weight); })
OP(aclnnInplaceLerps, (Tensor self, Tensor end, Scalar weight), { self.lerp_(end, weight); })
OP(aclnnLerps, (Tensor self, Tensor end, Scalar weight, Tensor out), { at::lerp_out(out, self, end, weight); })

OP(aclnnSWhere, (Tensor condition, Tensor self, Tensor other, Tensor out), { at::where_out(out, condition, self, other); })
