// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Matmuls of bfloat16 rows by AVX512_BF16, in place: the sums of pairs go into float32 lanes.
#pragma once
#include "ops/vectorized.h"

// Loops over a tile are unrolled, so that its sums stay in registers.
#define EACH _Pragma("GCC unroll 32")

namespace emu::bf16 {

constexpr int64_t kLanes = 32;     // bfloat16 values per step
constexpr int64_t kAhead = 32768;  // bytes that weights are fetched ahead

struct Product {
  const at::BFloat16 *x, *weights, *bias;  // bias may be null
  at::BFloat16* out;
  int64_t x_stride, stride, out_stride, width;
  bool transposed;  // weights are [N, K], else [K, N]; stride: of their rows

  Product from_row(int64_t m) const {
    auto part = *this;
    part.x += m * x_stride;
    part.out += m * out_stride;
    return part;
  }
  Product from_column(int64_t n) const {
    auto part = *this;
    part.weights += transposed ? n * stride : n;
    part.out += n;
    if (bias) part.bias += n;
    return part;
  }
};
void packed_matmul(const Product& whole, int64_t rows, int64_t columns);

}  // namespace emu::bf16

#if defined(__x86_64__)
#include <immintrin.h>
#define BF16_VECTORS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define BF16_INLINE __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace emu::bf16 {

inline bool has_vectors() { return vector_unit() == VectorUnit::avx512_bf16; }

// The sums of each vector's lanes.
BF16_VECTORS inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
  const auto ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const auto cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const auto quarters =
      _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  return _mm_add_ps(
      _mm_add_ps(_mm512_extractf32x4_ps(quarters, 0), _mm512_extractf32x4_ps(quarters, 1)),
      _mm_add_ps(_mm512_extractf32x4_ps(quarters, 2), _mm512_extractf32x4_ps(quarters, 3)));
}

// out[m][n] of `rows` rows of self and `columns` columns; sums of pairs go into float32 lanes.
template <int rows, int columns> BF16_VECTORS void tile(const at::BFloat16* x, int64_t x_stride,
    const at::BFloat16* weights, int64_t stride, int64_t width, bool from_memory, float* out) {
  constexpr int count = rows * columns;
  __m512 sums[count];
  EACH for (int i = 0; i < count; ++i) sums[i] = _mm512_setzero_ps();
  const auto add = [&](const auto& load) BF16_INLINE {
    __m512bh w[columns];
    EACH for (int n = 0; n < columns; ++n) w[n] = load(weights + n * stride);
    EACH for (int m = 0; m < rows; ++m) {
      const auto value = load(x + m * x_stride);
      EACH for (int n = 0; n < columns; ++n) sums[m * columns + n] =
          _mm512_dpbf16_ps(sums[m * columns + n], value, w[n]);
    }
  };
  int64_t k = 0;
  const auto whole = [&](const at::BFloat16* from)
                         BF16_INLINE { return (__m512bh)_mm512_loadu_epi16(from + k); };
  if (rows > 1 && from_memory) {
    // In the order of memory, which the loads of several columns are not. One row is fastest
    // without.
    const auto* ahead = reinterpret_cast<const char*>(weights) + kAhead;
    for (; k + kLanes <= width; k += kLanes, ahead += columns * sizeof(__m512)) {
      EACH for (int n = 0; n < columns; ++n) _mm_prefetch(ahead + n * sizeof(__m512), _MM_HINT_T1);
      add(whole);
    }
  }
  for (; k + kLanes <= width; k += kLanes) add(whole);
  if (k < width)
    add([&](const at::BFloat16* from) BF16_INLINE {
      return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32{1} << (width - k)) - 1, from + k);
    });
  const auto sum = [&](int i) BF16_INLINE {
    return i < count ? sums[i < count ? i : 0] : _mm512_setzero_ps();
  };
  EACH for (int i = 0; i < count; i += 4)
      _mm_storeu_ps(out + i, sums_of(sum(i), sum(i + 1), sum(i + 2), sum(i + 3)));
}

}  // namespace emu::bf16
#else
namespace emu::bf16 {
inline bool has_vectors() { return false; }
}  // namespace emu::bf16
#endif
