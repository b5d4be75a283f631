// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Pointwise operators of one tensor.
#include "operator/shapes.h"
#include "ops/upcast.h"

#define UNARY(NAME, FUNCTION) \
  SHAPED(                     \
      aclnn##NAME, (Tensor self, Tensor out), SAME(out, self), { at::FUNCTION##_out(out, self); })
#define UNARY_BOTH(NAME, FUNCTION) \
  UNARY(NAME, FUNCTION)            \
  OP(aclnnInplace##NAME, (Tensor self), { self.FUNCTION##_(); })
// The output may have another dtype than the function's result, so it is copied.
#define PREDICATE(NAME, FUNCTION) \
  SHAPED(                         \
      aclnn##NAME, (Tensor self, Tensor out), SAME(out, self), { out.copy_(at::FUNCTION(self)); })

// PyTorch's test of _foreach_abs passes with bool on Atlas A3; ATen's CPU kernel has none.
SHAPED(aclnnAbs, (Tensor self, Tensor out), SAME(out, self), {
  if (self.scalar_type() == at::kBool) out.copy_(self);
  else at::abs_out(out, self);
})
UNARY_BOTH(Acos, acos)
UNARY_BOTH(Acosh, acosh)
UNARY_BOTH(Asin, asin)
UNARY_BOTH(Asinh, asinh)
UNARY_BOTH(Atan, atan)
UNARY_BOTH(Atanh, atanh)
UNARY(BitwiseNot, bitwise_not)
UNARY_BOTH(Ceil, ceil)
UNARY_BOTH(Cos, cos)
UNARY_BOTH(Cosh, cosh)
UNARY_BOTH(Erf, erf)
UNARY_BOTH(Erfc, erfc)
UNARY_BOTH(Erfinv, erfinv)
UNARY_BOTH(Exp, exp)
UNARY_BOTH(Exp2, exp2)
UNARY_BOTH(Expm1, expm1)
UNARY_BOTH(Floor, floor)
UNARY_BOTH(Frac, frac)
UNARY_BOTH(Log, log)
UNARY_BOTH(Log10, log10)
UNARY_BOTH(Log1p, log1p)
UNARY_BOTH(Log2, log2)
UNARY_BOTH(LogicalNot, logical_not)
UNARY(Neg, neg)
UNARY_BOTH(Reciprocal, reciprocal)
UNARY(Round, round)
UNARY_BOTH(Rsqrt, rsqrt)
UNARY(Sign, sgn)
UNARY(Signbit, signbit)
UNARY_BOTH(Sin, sin)
UNARY_BOTH(Sinc, sinc)
UNARY_BOTH(Sinh, sinh)
UNARY_BOTH(Sqrt, sqrt)
UNARY_BOTH(Tan, tan)
UNARY(Trunc, trunc)

PREDICATE(IsFinite, isfinite)
PREDICATE(IsPosInf, isposinf)
PREDICATE(IsNegInf, isneginf)

SHAPED(aclnnRoundDecimals, (Tensor self, int64_t decimals, Tensor out), SAME(out, self),
    { at::round_out(out, self, decimals); })
OP(aclnnInplaceRoundDecimals, (Tensor self, int64_t decimals), { self.round_(decimals); })
OP(aclnnInplaceNanToNum, (Tensor self, float nan, float posinf, float neginf),
    { self.nan_to_num_(nan, posinf, neginf); })
SHAPED(aclnnNanToNum, (Tensor self, float nan, float posinf, float neginf, Tensor out),
    SAME(out, self), { at::nan_to_num_out(out, self, nan, posinf, neginf); })

OP(aclnnAngleV2, (Tensor self, Tensor out), { out.copy_(at::angle(upcast(self))); })
// A negative epsilon means none (op-plugin's LogitKernelNpuOpApi.cpp).
OP(aclnnLogit, (Tensor self, double epsilon, Tensor out),
    { out.copy_(at::logit(upcast(self), epsilon < 0 ? std::nullopt : Opt<double>(epsilon))); })
