// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Operators on lists of tensors. The older of two versions has its scalar in a tensor of one
// element (op-plugin).
#include "ops/upcast.h"

namespace {
using namespace emu;

template <class Function> void each(const Tensors& out, Function&& function) {
  for (size_t i = 0; i < out.size(); ++i) out[i].copy_(function(i));
}

void one_number(const char* argument, const Tensor& scalar) {
  require(
      scalar.numel() == 1, argument, " has shape ", scalar.sizes(), "; it must have one element");
}
}  // namespace

#define FOREACH_UNARY(NAME, FUNCTION)                 \
  OP(aclnnForeach##NAME, (Tensors self, Tensors out), \
      { each(out, [&](size_t i) { return at::FUNCTION(upcast(self[i])); }); })

#define FOREACH_LIST(NAME, FUNCTION)                                       \
  OP(aclnnForeach##NAME##List, (Tensors self, Tensors other, Tensors out), \
      { each(out, [&](size_t i) { return at::FUNCTION(upcast(self[i]), upcast(other[i])); }); })

#define FOREACH_SCALAR_FORM(NAME, FUNCTION, FORM, TYPE, VALUE)          \
  OP(aclnnForeach##NAME##FORM, (Tensors self, TYPE other, Tensors out), \
      { each(out, [&](size_t i) { return FUNCTION(upcast(self[i]), VALUE); }); })

#define FOREACH_SCALAR(NAME, FUNCTION)                                          \
  FOREACH_SCALAR_FORM(NAME, FUNCTION, ScalarV2, Scalar, other)                  \
  FOREACH_SCALAR_FORM(NAME, FUNCTION, ScalarList, Scalars, other[i])            \
  SHAPED(aclnnForeach##NAME##Scalar, (Tensors self, Tensor other, Tensors out), \
      one_number("scalar", other), {                                            \
        const auto number = other.item();                                       \
        each(out, [&](size_t i) { return FUNCTION(upcast(self[i]), number); }); \
      })

#define FOREACH_SCALED(NAME, FUNCTION)                                                           \
  OP(aclnnForeach##NAME##ListV2, (Tensors self, Tensors other, Scalar alpha, Tensors out), {     \
    each(out, [&](size_t i) { return at::FUNCTION(upcast(self[i]), upcast(other[i]), alpha); }); \
  })                                                                                             \
  SHAPED(aclnnForeach##NAME##List, (Tensors self, Tensors other, Tensor alpha, Tensors out),     \
      one_number("alpha", alpha), {                                                              \
        const auto number = alpha.item();                                                        \
        each(out,                                                                                \
            [&](size_t i) { return at::FUNCTION(upcast(self[i]), upcast(other[i]), number); });  \
      })

// self + value * a (op) b; the list version has its values in a tensor.
#define FOREACH_THREE(NAME, FUNCTION)                                               \
  OP(aclnnForeach##NAME##ScalarV2,                                                  \
      (Tensors self, Tensors a, Tensors b, Scalar value, Tensors out), {            \
        each(out, [&](size_t i) {                                                   \
          return at::FUNCTION(upcast(self[i]), upcast(a[i]), upcast(b[i]), value);  \
        });                                                                         \
      })                                                                            \
  SHAPED(aclnnForeach##NAME##Scalar,                                                \
      (Tensors self, Tensors a, Tensors b, Tensor value, Tensors out),              \
      one_number("scalar", value), {                                                \
        const auto number = value.item();                                           \
        each(out, [&](size_t i) {                                                   \
          return at::FUNCTION(upcast(self[i]), upcast(a[i]), upcast(b[i]), number); \
        });                                                                         \
      })                                                                            \
  OP(aclnnForeach##NAME##ScalarList,                                                \
      (Tensors self, Tensors a, Tensors b, Tensor values, Tensors out), {           \
        each(out, [&](size_t i) {                                                   \
          return at::FUNCTION(upcast(self[i]), upcast(a[i]), upcast(b[i]),          \
              values[static_cast<int64_t>(i)].item());                              \
        });                                                                         \
      })

namespace {
Tensor larger(const Tensor& self, const Scalar& other) { return at::clamp_min(self, other); }
Tensor smaller(const Tensor& self, const Scalar& other) { return at::clamp_max(self, other); }

// The modes of op-plugin's ForeachRoundOffNumberKernelNpuOpApi.cpp.
Tensor rounded(const Tensor& self, int64_t mode) {
  switch (mode) {
    case 1: return at::round(self);
    case 2: return at::floor(self);
    case 3: return at::ceil(self);
    case 5: return at::trunc(self);
    case 7: return at::frac(self);
  }
  throw Error(kOpParam,
      text("round mode ", mode, "; supported: 1 round, 2 floor, 3 ceil, 5 trunc and 7 frac"));
}
}  // namespace

FOREACH_UNARY(Abs, abs)
FOREACH_UNARY(Acos, acos)
FOREACH_UNARY(Asin, asin)
FOREACH_UNARY(Atan, atan)
FOREACH_UNARY(Cos, cos)
FOREACH_UNARY(Cosh, cosh)
FOREACH_UNARY(Erf, erf)
FOREACH_UNARY(Erfc, erfc)
FOREACH_UNARY(Exp, exp)
FOREACH_UNARY(Expm1, expm1)
FOREACH_UNARY(Log, log)
FOREACH_UNARY(Log10, log10)
FOREACH_UNARY(Log1p, log1p)
FOREACH_UNARY(Log2, log2)
FOREACH_UNARY(Neg, neg)
FOREACH_UNARY(Reciprocal, reciprocal)
FOREACH_UNARY(Sigmoid, sigmoid)
FOREACH_UNARY(Sign, sign)
FOREACH_UNARY(Sin, sin)
FOREACH_UNARY(Sinh, sinh)
FOREACH_UNARY(Sqrt, sqrt)
FOREACH_UNARY(Tan, tan)
FOREACH_UNARY(Tanh, tanh)

FOREACH_SCALED(Add, add)
FOREACH_SCALED(Sub, sub)
FOREACH_LIST(Mul, mul)
FOREACH_LIST(Div, div)
FOREACH_LIST(Maximum, maximum)
FOREACH_LIST(Minimum, minimum)
FOREACH_LIST(Pow, pow)

FOREACH_SCALAR(Add, at::add)
FOREACH_SCALAR(Sub, at::sub)
FOREACH_SCALAR(Mul, at::mul)
FOREACH_SCALAR(Div, at::div)
FOREACH_SCALAR(Maximum, larger)
FOREACH_SCALAR(Minimum, smaller)
FOREACH_SCALAR(Pow, at::pow)

FOREACH_THREE(Addcdiv, addcdiv)
FOREACH_THREE(Addcmul, addcmul)

OP(aclnnForeachLerpList, (Tensors self, Tensors end, Tensors weight, Tensors out), {
  each(out, [&](size_t i) { return at::lerp(upcast(self[i]), upcast(end[i]), upcast(weight[i])); });
})
OP(aclnnForeachLerpScalar, (Tensors self, Tensors end, Scalar weight, Tensors out),
    { each(out, [&](size_t i) { return at::lerp(upcast(self[i]), upcast(end[i]), weight); }); })
OP(aclnnForeachPowScalarAndTensor, (Scalar self, Tensors exponent, Tensors out),
    { each(out, [&](size_t i) { return at::pow(self, upcast(exponent[i])); }); })
OP(aclnnForeachRoundOffNumberV2, (Tensors self, Scalar mode, Tensors out),
    { each(out, [&](size_t i) { return rounded(upcast(self[i]), mode.toLong()); }); })
CHECKED(aclnnForeachRoundOffNumber, (Tensors self, Tensor mode, Tensors out), {
  one_number("roundMode", mode);
  COMPUTE {
    const auto number = mode.item<int64_t>();
    each(out, [&](size_t i) { return rounded(upcast(self[i]), number); });
  };
})
OP(aclnnForeachCopy, (Tensors self, Tensors out), { each(out, [&](size_t i) { return self[i]; }); })
OP(aclnnForeachZeroInplace, (Tensors self), {
  for (auto& tensor : self) tensor.zero_();
})
OP(aclnnForeachNorm, (Tensors self, Scalar order, Tensors out),
    { each(out, [&](size_t i) { return at::linalg_vector_norm(upcast(self[i]), order); }); })
// Sets found_inf if a gradient is not finite; gradients are scaled in any case (torch's amp
// documentation).
OP(aclnnForeachNonFiniteCheckAndUnscale, (Tensors gradients, Tensor found, Tensor scale), {
  for (auto& gradient : gradients) {
    if (!at::isfinite(gradient).all().item<bool>()) found.fill_(1);
    gradient.copy_(upcast(gradient) * scale);
  }
})
OP(aclnnAmpUpdateScale,
    (Tensor scale, Tensor tracker, Tensor found, double growth, double backoff, int64_t interval,
        Tensor new_scale, Tensor new_tracker),
    {
      new_scale.copy_(scale);
      new_tracker.copy_(tracker);
      at::_amp_update_scale_(new_scale, new_tracker, found, growth, backoff, interval);
    })
