// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// cubeMathType, the parameter of matrix products and convolutions: the type in which the cube
// computes float32 (CANN's API reference, "aclnnMm"; torch_npu's CalcuOpUtil::GetCubeMathType maps
// torch.npu.matmul.allow_hf32, torch.npu.conv.allow_hf32 and the chip's default precision mode to
// it). Matmuls are accumulated in float32; other types are not affected.
#pragma once
#include "core/vector_unit.h"
#include "operator/op.h"

namespace emu {

// ATen multiplies 16-bit matrices in a plain loop where oneDNN has no kernels for them: bfloat16
// needs AVX-512, float16 its own extension. The generic unit stays ATen's.
inline bool is_slow_matmul(at::ScalarType type) {
  const auto unit = vector_unit();
  return (type == at::kHalf && unit != VectorUnit::generic) ||
         (type == at::kBFloat16 && unit == VectorUnit::avx2);
}

// matmul(out, inputs...) in float32, rounded once.
template <class Matmul, class... Inputs>
void multiply_wide(const Matmul& matmul, const Tensor& out, const Inputs&... inputs) {
  (emu::require(inputs.scalar_type() == out.scalar_type(), "a matrix is ", inputs.scalar_type(),
       ", and another ", out.scalar_type(), "; their dtypes must be equal"),
      ...);
  auto sums = at::empty(out.sizes(), out.options().dtype(at::kFloat));
  matmul(sums, inputs.to(at::kFloat)...);
  out.copy_(sums);
}
// The same where ATen's kernel is slow, by that kernel elsewhere.
template <class Matmul, class... Inputs>
void multiply_into(const Matmul& matmul, Tensor out, const Inputs&... inputs) {
  if (is_slow_matmul(out.scalar_type())) return multiply_wide(matmul, out, inputs...);
  matmul(out, inputs...);
}

// The type in which CANN multiplies matrices of several types: PyTorch's promotion ("aclnnMm",
// "aclnnMatmul", "aclnnAddmm", "aclnnBaddbmm", "aclnnAddmv", and "aclnnBatchMatMul" from CANN
// 8.3 on).
template <class... Inputs> at::ScalarType promoted(const Tensor& first, const Inputs&... others) {
  auto type = first.scalar_type();
  ((type = c10::promoteTypes(type, others.scalar_type())), ...);
  return type;
}
// multiply_into() of inputs of any types; the result is converted to that of out. torch_npu gives
// out the type of the first input.
template <class Matmul, class... Inputs>
void multiply_promoted(const Matmul& matmul, Tensor out, const Inputs&... inputs) {
  const auto type = promoted(inputs...);
  if (type == out.scalar_type() && (... && (inputs.scalar_type() == type)))
    return multiply_into(matmul, out, inputs...);
  emu::require(at::isFloatingType(out.scalar_type()) || out.scalar_type() == type, "out is ",
      out.scalar_type(), " and the product ", type, "; allowed: this type and floating types");
  auto product = at::empty(out.sizes(), out.options().dtype(type));
  multiply_into(matmul, product, inputs.to(type)...);
  out.copy_(product);
}
inline constexpr auto kMatmul = [](auto& out, const auto& a, const auto& b) {
  at::matmul_out(out, a, b);
};

struct CubeMath {
  // -1: as 0, with float32 results of float16. 4: float32, its sums in higher precision.
  enum Type : int8_t { kKeep = 0, kAllowDownPrecision = 1, kFloat16 = 2, kHf32 = 3 };
  int8_t type;

  // Ascend310P's cube has no float32: 0 and 3 are errors for float32 inputs ("aclnnMm").
  template <class... Inputs> void check(const Inputs&... inputs) const {
    if (is_chip("Ascend310P") && ((inputs.scalar_type() == at::kFloat) || ...))
      emu::require(type == kAllowDownPrecision || type == kFloat16, "cubeMathType is ", int{type},
          " for float32; ", chip().name, " has no float32 matmuls, so it must be 1 or 2");
  }
  // The values that the cube multiplies.
  Tensor operator()(const Tensor& input) const {
    if (input.scalar_type() != at::kFloat) return input;
    const bool half = type == kFloat16 || (type == kAllowDownPrecision && is_chip("Ascend310P"));
    if (half) return input.to(at::kHalf).to(at::kFloat);
    return type == kHf32 || type == kAllowDownPrecision ? to_hf32(input) : input;
  }

 private:
  // HF32 has float32's range and 11 bits of mantissa (CANN's documentation of
  // ENABLE_HF32_EXECUTION); rounded to nearest, ties to even (transMode 0, the default of Ascend
  // C's Matmul::SetHF32).
  static Tensor to_hf32(const Tensor& input) {
    const auto bits = input.contiguous().view(at::kInt);
    const auto rounded = at::bitwise_and(
        bits + (at::bitwise_and(at::bitwise_right_shift(bits, 12), 1) + 0x7FF), ~0xFFF);
    return at::where(at::isfinite(input), rounded.view(at::kFloat), input);
  }
};

template <> struct Arg<CubeMath> {
  using C = int8_t;
  static CubeMath get(int8_t type) {
    within("cubeMathType", int{type}, -1, 4);
    return {type};
  }
};

}  // namespace emu
