// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Loops that are compiled for several vector units, of which the CPU's is chosen when they run.
#pragma once
#include <ATen/core/Tensor.h>

#include <bit>

#include "core/vector_unit.h"

namespace emu {

#if defined(__x86_64__)
template <class Loop> __attribute__((flatten,
    target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))) void with_avx512(const Loop& loop) {
  loop();
}
template <class Loop>
__attribute__((flatten, target("avx2,fma,f16c"))) void with_avx2(const Loop& loop) {
  loop();
}
template <class Loop> void vectorized(const Loop& loop) {
  const auto unit = vector_unit();
  unit >= VectorUnit::avx512 ? with_avx512(loop)
  : unit == VectorUnit::avx2 ? with_avx2(loop)
                             : loop();
}
#else
template <class Loop> void vectorized(const Loop& loop) { loop(); }
#endif

// Conversions that compilers vectorize.
inline float widened(at::BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.x) << 16);
}
template <class T> inline float widened(T x) { return static_cast<float>(x); }
template <class T> inline T rounded(float x) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {  // to nearest, ties to even
    const auto bits = std::bit_cast<uint32_t>(x);
    const uint32_t to_even = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return at::BFloat16(
        static_cast<uint16_t>(x == x ? to_even : 0x7FC0), at::BFloat16::from_bits());
  } else {
    return static_cast<T>(x);
  }
}

// e^x within two ulps: Cephes' polynomial. 2^n in two factors, so that results may overflow and be
// subnormal.
inline float exp_of(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the sum has no fraction
  x = x > 104.0f ? 104.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float shifted = x * 1.44269504088896341f + kRound, n = shifted - kRound;
  const int power = std::bit_cast<int>(shifted) - std::bit_cast<int>(kRound), half = power >> 1;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>((half + 127) << 23) *
         std::bit_cast<float>((power - half + 127) << 23);
}

}  // namespace emu
