// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Families of operators that differ by a function of ATen. families.toml has the operators of each;
// families.py writes the source that defines them.
#pragma once
#include <ATen/ScalarOps.h>

#include "operator/shapes.h"
#include "ops/upcast.h"

namespace emu::ops {

// Scalar with the type promotion of a Python number.
inline Tensor number(const Scalar& value) { return at::native::wrapped_scalar_tensor(value); }

// In-place operators promote types; self must be able to hold the result.
template <class Other> void fits(const Tensor& self, const Other& other) {
  const auto result = at::result_type(self, other);
  require(c10::canCast(result, self.scalar_type()), "result type ", c10::toString(result),
      " can't be cast to the desired output type ", c10::toString(self.scalar_type()), " of self");
}

// ATen's any and all reduce nothing where no dimension is given.
inline at::OptionalIntArrayRef all_if_none(const Ints& dims) {
  return dims.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims);
}

template <class Function> void each(const Tensors& out, Function&& function) {
  for (size_t i = 0; i < out.size(); ++i) out[i].copy_(function(i));
}
inline void one_number(const char* argument, const Tensor& scalar) {
  require(
      scalar.numel() == 1, argument, " has shape ", scalar.sizes(), "; it must have one element");
}
inline Tensor larger(const Tensor& self, const Scalar& other) { return at::clamp_min(self, other); }
inline Tensor smaller(const Tensor& self, const Scalar& other) {
  return at::clamp_max(self, other);
}

}  // namespace emu::ops

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

#define BINARY(NAME, FUNCTION, OTHER)                                                       \
  SHAPED(aclnn##NAME, (Tensor self, Tensor OTHER, Tensor out), BROADCAST(out, self, OTHER), \
      { at::FUNCTION##_out(out, self, OTHER); })
#define BINARY_BOTH(NAME, FUNCTION, OTHER)                                      \
  BINARY(NAME, FUNCTION, OTHER)                                                 \
  SHAPED(aclnnInplace##NAME, (Tensor self, Tensor OTHER), EXPANDS(self, OTHER), \
      { self.FUNCTION##_(OTHER); })
#define WITH_SCALAR(NAME, FUNCTION, OTHER)                                      \
  SHAPED(aclnn##NAME, (Tensor self, Scalar OTHER, Tensor out), SAME(out, self), \
      { at::FUNCTION##_out(out, self, OTHER); })
#define WITH_SCALAR_BOTH(NAME, FUNCTION, OTHER) \
  WITH_SCALAR(NAME, FUNCTION, OTHER)            \
  OP(aclnnInplace##NAME, (Tensor self, Scalar OTHER), { self.FUNCTION##_(OTHER); })
#define WITH_NUMBER(NAME, FUNCTION, OTHER)                                      \
  SHAPED(aclnn##NAME, (Tensor self, Scalar OTHER, Tensor out), SAME(out, self), \
      { at::FUNCTION##_out(out, self, number(OTHER)); })
#define UPCAST_BINARY(NAME, FUNCTION)                      \
  OP(aclnn##NAME, (Tensor self, Tensor other, Tensor out), \
      { out.copy_(at::FUNCTION(upcast(self), upcast(other))); })
#define UPCAST_WITH_SCALAR(NAME, FUNCTION, OTHER)          \
  OP(aclnn##NAME, (Tensor self, Scalar OTHER, Tensor out), \
      { out.copy_(at::FUNCTION(upcast(self), OTHER)); })
#define WITH_INTEGER_BOTH(NAME, FUNCTION, VALUE)                                 \
  SHAPED(aclnn##NAME, (Tensor self, int64_t VALUE, Tensor out), SAME(out, self), \
      { at::FUNCTION##_out(out, self, VALUE); })                                 \
  OP(aclnnInplace##NAME, (Tensor self, int64_t VALUE), { self.FUNCTION##_(VALUE); })

// Tensor-tensor and tensor-scalar forms, with in-place variants.
#define ARITHMETIC(NAME, FUNCTION)                        \
  BINARY(NAME, FUNCTION, other)                           \
  WITH_NUMBER(NAME##s, FUNCTION, other)                   \
  SHAPED(aclnnInplace##NAME, (Tensor self, Tensor other), \
      (EXPANDS(self, other), fits(self, other)), { self.FUNCTION##_(other); })
#define SCALED(NAME, FUNCTION)                                                                   \
  SHAPED(aclnn##NAME##s, (Tensor self, Scalar other, Scalar alpha, Tensor out), SAME(out, self), \
      { at::FUNCTION##_out(out, self, number(other), alpha); })                                  \
  SHAPED(aclnnInplace##NAME, (Tensor self, Tensor other, Scalar alpha),                          \
      (EXPANDS(self, other), fits(self, other)), { self.FUNCTION##_(other, alpha); })            \
  SHAPED(aclnnInplace##NAME##s, (Tensor self, Scalar other, Scalar alpha), fits(self, other),    \
      { self.FUNCTION##_(number(other), alpha); })
#define COMPARE(NAME, FUNCTION)              \
  BINARY_BOTH(NAME##Tensor, FUNCTION, other) \
  WITH_SCALAR_BOTH(NAME##Scalar, FUNCTION, other)
#define BITWISE(NAME, FUNCTION)         \
  BINARY(NAME##Tensor, FUNCTION, other) \
  WITH_NUMBER(NAME##Scalar, FUNCTION, other)
#define BITWISE_BOTH(NAME, FUNCTION)         \
  BINARY_BOTH(NAME##Tensor, FUNCTION, other) \
  WITH_NUMBER(NAME##Scalar, FUNCTION, other) \
  OP(aclnnInplace##NAME##Scalar, (Tensor self, Scalar other), { self.FUNCTION##_(number(other)); })

#define REDUCTION(NAME, FUNCTION)                                         \
  SHAPED(aclnn##NAME, (Tensor self, Ints dims, bool keepdim, Tensor out), \
      REDUCED(out, self, dims, keepdim), { at::FUNCTION##_out(out, self, dims, keepdim); })
#define REDUCTION_INTO_DTYPE(NAME, FUNCTION)                                           \
  SHAPED(aclnn##NAME, (Tensor self, Ints dims, bool keepdim, DType dtype, Tensor out), \
      REDUCED(out, self, dims, keepdim), { at::FUNCTION##_out(out, self, dims, keepdim, dtype); })
#define LOGICAL_REDUCTION(NAME, FUNCTION)                                 \
  SHAPED(aclnn##NAME, (Tensor self, Ints dims, bool keepdim, Tensor out), \
      REDUCED(out, self, dims, keepdim),                                  \
      { out.copy_(at::FUNCTION(self, all_if_none(dims), keepdim)); })
#define TO_NUMBER(NAME, FUNCTION) \
  SHAPED(aclnn##NAME, (Tensor self, Tensor out), SHAPE(out, {}), { out.copy_(at::FUNCTION(self)); })
#define INDEX_OF(NAME, FUNCTION)                                            \
  SHAPED(aclnn##NAME, (Tensor self, int64_t dim, bool keepdim, Tensor out), \
      REDUCED(out, self, dim, keepdim), { out.copy_(at::FUNCTION(self, dim, keepdim)); })
// Indices may be int32.
#define WITH_INDEX(NAME, FUNCTION)                                                             \
  SHAPED(aclnn##NAME, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices), \
      (REDUCED(values, self, dim, keepdim), SAME(indices, values)),                            \
      { copy_both(at::FUNCTION(self, dim, keepdim), values, indices); })
#define SCAN_WITH_INDEX(NAME, FUNCTION)                                          \
  SHAPED(aclnn##NAME, (Tensor self, int64_t dim, Tensor values, Tensor indices), \
      (ALONG(values, self, dim), SAME(indices, self)),                           \
      { copy_both(at::FUNCTION(self, dim), values, indices); })
#define ALONG_DIM(NAME, FUNCTION)                                                        \
  OP(aclnn##NAME, (Tensor self, int64_t dim, bool keepdim, Tensor first, Tensor second), \
      { copy_both(at::FUNCTION(self, dim, keepdim), first, second); })
#define SPREAD(NAME, FUNCTION)                                                                     \
  SHAPED(aclnn##NAME, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor out),      \
      REDUCED(out, self, dims, keepdim), {                                                         \
        at::FUNCTION##_out(out, self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim); \
      })
#define SPREAD_AND_MEAN(NAME, FUNCTION)                                                           \
  SHAPED(aclnn##NAME,                                                                             \
      (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor spread, Tensor mean),     \
      (REDUCED(spread, self, dims, keepdim), SAME(mean, spread)), {                               \
        copy_both(at::FUNCTION(self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim), \
            spread, mean);                                                                        \
      })

// On lists of tensors.
#define FOREACH(NAME, PARAMETERS, ...) \
  OP(aclnnForeach##NAME, PARAMETERS, { each(out, [&](size_t i) { return __VA_ARGS__; }); })
// The older of two versions has its scalar in a tensor of one element.
#define FOREACH_NUMBER(NAME, PARAMETERS, LABEL, SCALAR, ...)          \
  SHAPED(aclnnForeach##NAME, PARAMETERS, one_number(LABEL, SCALAR), { \
    const auto number = SCALAR.item();                                \
    each(out, [&](size_t i) { return __VA_ARGS__; });                 \
  })
#define FOREACH_UNARY(NAME, FUNCTION) \
  FOREACH(NAME, (Tensors self, Tensors out), at::FUNCTION(upcast(self[i])))
#define FOREACH_LIST(NAME, FUNCTION)                              \
  FOREACH(NAME##List, (Tensors self, Tensors other, Tensors out), \
      at::FUNCTION(upcast(self[i]), upcast(other[i])))
#define FOREACH_SCALAR(NAME, FUNCTION)                                                             \
  FOREACH(                                                                                         \
      NAME##ScalarV2, (Tensors self, Scalar other, Tensors out), FUNCTION(upcast(self[i]), other)) \
  FOREACH(NAME##ScalarList, (Tensors self, Scalars other, Tensors out),                            \
      FUNCTION(upcast(self[i]), other[i]))                                                         \
  FOREACH_NUMBER(NAME##Scalar, (Tensors self, Tensor other, Tensors out), "scalar", other,         \
      FUNCTION(upcast(self[i]), number))
#define FOREACH_SCALED(NAME, FUNCTION)                                                          \
  FOREACH(NAME##ListV2, (Tensors self, Tensors other, Scalar alpha, Tensors out),               \
      at::FUNCTION(upcast(self[i]), upcast(other[i]), alpha))                                   \
  FOREACH_NUMBER(NAME##List, (Tensors self, Tensors other, Tensor alpha, Tensors out), "alpha", \
      alpha, at::FUNCTION(upcast(self[i]), upcast(other[i]), number))
// self + value * a (op) b; the list version has its values in a tensor.
#define FOREACH_THREE(NAME, FUNCTION)                                                           \
  FOREACH(NAME##ScalarV2, (Tensors self, Tensors a, Tensors b, Scalar value, Tensors out),      \
      at::FUNCTION(upcast(self[i]), upcast(a[i]), upcast(b[i]), value))                         \
  FOREACH_NUMBER(NAME##Scalar, (Tensors self, Tensors a, Tensors b, Tensor value, Tensors out), \
      "scalar", value, at::FUNCTION(upcast(self[i]), upcast(a[i]), upcast(b[i]), number))       \
  FOREACH(NAME##ScalarList, (Tensors self, Tensors a, Tensors b, Tensor values, Tensors out),   \
      at::FUNCTION(                                                                             \
          upcast(self[i]), upcast(a[i]), upcast(b[i]), values[static_cast<int64_t>(i)].item()))
