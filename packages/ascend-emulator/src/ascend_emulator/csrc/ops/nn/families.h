// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Families of operators that differ by a function of ATen. families.toml has the operators of each;
// families.py writes the source that defines them.
#pragma once
#include "operator/shapes.h"
#include "ops/upcast.h"

namespace emu::ops {

// Scales of resampling that are not positive are ignored.
inline Opt<double> scale(double value) { return value > 0 ? Opt<double>(value) : std::nullopt; }

// A3 refuses negative padding in float32, and takes it in float16, in PyTorch's tests
// (Ascend/pytorch, ci-test, disabled_testcases.json: aclnnReflectionPad2d).
inline void not_negative(const Tensor& self, const Ints& padding) {
  require(self.scalar_type() != at::kFloat ||
              std::all_of(padding.begin(), padding.end(), [](int64_t each) { return each >= 0; }),
      "padding is ", at::IntArrayRef(padding), "; it must not be negative in Float");
}

}  // namespace emu::ops

#define UNPACK(...) __VA_ARGS__  // of parameters in parentheses

#define ACTIVATION(NAME, FUNCTION) \
  SHAPED(                          \
      aclnn##NAME, (Tensor self, Tensor out), SAME(out, self), { at::FUNCTION##_out(out, self); })
#define ACTIVATION_BOTH(NAME, FUNCTION) \
  ACTIVATION(NAME, FUNCTION)            \
  OP(aclnnInplace##NAME, (Tensor self), { at::FUNCTION##_(self); })
#define SOFTMAX(NAME, FUNCTION)                                                      \
  SHAPED(aclnn##NAME, (Tensor self, int64_t dim, Tensor out), ALONG(out, self, dim), \
      { at::FUNCTION##_out(out, self, dim, out.scalar_type()); })
#define SOFTMAX_GRADIENT(NAME, FUNCTION)                                     \
  OP(aclnn##NAME, (Tensor grad, Tensor output, int64_t dim, Tensor out), {   \
    const auto y = upcast(output);                                           \
    const auto slope = upcast(grad).to(y.scalar_type());                     \
    out.copy_(at::FUNCTION##_backward_data(slope, y, dim, y.scalar_type())); \
  })
#define GRADIENT(NAME, FUNCTION)                          \
  OP(aclnn##NAME, (Tensor grad, Tensor self, Tensor out), \
      { out.copy_(at::FUNCTION##_backward(upcast(grad), upcast(self))); })
#define GRADIENT_WITH(NAME, FUNCTION, PARAMETERS, ...)                       \
  OP(aclnn##NAME, (Tensor grad, Tensor self, UNPACK PARAMETERS, Tensor out), \
      { out.copy_(at::FUNCTION##_backward(upcast(grad), upcast(self), __VA_ARGS__)); })
#define ACTIVATION_WITH(NAME, FUNCTION, PARAMETERS, ...)                             \
  SHAPED(aclnn##NAME, (Tensor self, UNPACK PARAMETERS, Tensor out), SAME(out, self), \
      { at::FUNCTION##_out(out, self, __VA_ARGS__); })

// Reductions: 0 none, 1 mean, 2 sum (at::Reduction).
#define LOSS(NAME, FUNCTION, PARAMETERS, ...)                                  \
  OP(aclnn##NAME, (Tensor self, Tensor target, UNPACK PARAMETERS, Tensor out), \
      { out.copy_(at::FUNCTION(upcast(self), upcast(target), __VA_ARGS__)); })
#define LOSS_BOTH(NAME, FUNCTION, PARAMETERS, ...)                                             \
  LOSS(NAME, FUNCTION, PARAMETERS, __VA_ARGS__)                                                \
  OP(aclnn##NAME##Backward,                                                                    \
      (Tensor grad, Tensor self, Tensor target, UNPACK PARAMETERS, Tensor out), {              \
        out.copy_(                                                                             \
            at::FUNCTION##_backward(upcast(grad), upcast(self), upcast(target), __VA_ARGS__)); \
      })
#define NLL(NAME, FUNCTION)                                                                \
  OP(aclnn##NAME,                                                                          \
      (Tensor self, Tensor target, Opt<Tensor> weight, int64_t reduction, int64_t ignored, \
          Tensor out, Tensor total),                                                       \
      {                                                                                    \
        const auto classes = self.size(self.dim() == 1 ? 0 : 1);                           \
        const auto compute = [&] {                                                         \
          const auto [loss, sum] = at::FUNCTION##_forward(                                 \
              upcast(self), to_int64(target), upcast(weight), reduction, ignored);         \
          out.copy_(loss);                                                                 \
          total.copy_(sum);                                                                \
        };                                                                                 \
        with_index("target", target, classes, compute, ignored);                           \
      })                                                                                   \
  OP(aclnn##NAME##Backward,                                                                \
      (Tensor grad, Tensor self, Tensor target, Opt<Tensor> weight, int64_t reduction,     \
          int64_t ignored, Tensor total, Tensor out),                                      \
      {                                                                                    \
        out.copy_(at::FUNCTION##_backward(upcast(grad), upcast(self), to_int64(target),    \
            upcast(weight), reduction, ignored, upcast(total)));                           \
      })

#define ADAPTIVE_MEAN(NAME, FUNCTION)                   \
  OP(aclnn##NAME, (Tensor self, Ints size, Tensor out), \
      { out.copy_(at::FUNCTION(upcast(self), size)); }) \
  GRADIENT(NAME##Backward, FUNCTION)
#define ADAPTIVE_MAXIMUM(NAME, FUNCTION)                                            \
  OP(aclnn##NAME, (Tensor self, Ints size, Tensor out, Tensor indices),             \
      { copy_both(at::FUNCTION(upcast(self), size), out, indices); })               \
  OP(aclnn##NAME##Backward, (Tensor grad, Tensor self, Tensor indices, Tensor out), \
      { out.copy_(at::FUNCTION##_backward(upcast(grad), upcast(self), to_int64(indices))); })

// SCALES are the parameters behind the sizes.
#define UPSAMPLE(NAME, FUNCTION, SCALES, ...)                                  \
  OP(aclnnUpsample##NAME, (Tensor self, Ints size, UNPACK SCALES, Tensor out), \
      { out.copy_(at::FUNCTION(upcast(self), size, __VA_ARGS__)); })
#define UPSAMPLE_GRADIENT(NAME, FUNCTION, SCALES, ...)                                     \
  OP(aclnnUpsample##NAME, (Tensor grad, Ints size, Ints input, UNPACK SCALES, Tensor out), \
      { out.copy_(at::FUNCTION##_backward(upcast(grad), size, input, __VA_ARGS__)); })

#define GRID(NAME, FUNCTION)                                                                      \
  OP(aclnn##NAME,                                                                                 \
      (Tensor self, Tensor grid, int64_t interpolation, int64_t padding, bool align, Tensor out), \
      { out.copy_(at::FUNCTION(upcast(self), upcast(grid), interpolation, padding, align)); })    \
  OP(aclnn##NAME##Backward,                                                                       \
      (Tensor grad, Tensor self, Tensor grid, int64_t interpolation, int64_t padding, bool align, \
          Bools mask, Opt<Tensor> grad_self, Opt<Tensor> grad_grid),                              \
      {                                                                                           \
        const auto [x, g] = at::FUNCTION##_backward(upcast(grad), upcast(self), upcast(grid),     \
            interpolation, padding, align, {mask[0], mask[1]});                                   \
        copy_if_given(grad_self, x);                                                              \
        copy_if_given(grad_grid, g);                                                              \
      })
#define PAD(NAME, FUNCTION)                                                                 \
  SHAPED(aclnn##NAME, (Tensor self, Ints padding, Tensor out), not_negative(self, padding), \
      { out.copy_(at::FUNCTION(upcast(self), padding)); })                                  \
  OP(aclnn##NAME##Backward, (Tensor grad, Tensor self, Ints padding, Tensor out),           \
      { out.copy_(at::FUNCTION##_backward(upcast(grad), upcast(self), padding)); })
