// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Matmuls of bfloat16 rows without bfloat16 instructions: weights are read in bfloat16 and widened
// in registers. The vectors are the compiler's, so that one source serves AVX-512, AVX2 and
// NEON.
#pragma once
#include "bf16_tile.h"

namespace emu::bf16 {

// The generic unit of x86 stays ATen's: its results are the same on every processor.
inline bool has_widened_tiles() {
#if defined(__x86_64__)
  return vector_unit() != VectorUnit::generic;
#else
  return true;
#endif
}

template <int bytes> struct Vectors {
  typedef uint32_t Words __attribute__((vector_size(bytes)));
  typedef float Floats __attribute__((vector_size(bytes)));
  static constexpr int64_t kValues = bytes / 2;  // bfloat16 values of a vector of pairs

  // The first and the second values of pairs.
  static void split(const at::BFloat16* from, Floats& first, Floats& second) {
    Words words;
    std::memcpy(&words, from, sizeof(words));
    first = (Floats)(words << 16);
    second = (Floats)(words & 0xFFFF0000);
  }
  static float sum(const Floats& lanes) {
    float all[bytes / 4];
    std::memcpy(all, &lanes, sizeof(all));
    EACH for (int step = bytes / 8; step; step /= 2) EACH for (int i = 0; i < step; ++i) all[i] +=
        all[i + step];
    return all[0];
  }
};

template <int bytes, int rows, int columns>
inline void widened_tile(const Product& p, int64_t column) {
  using V = Vectors<bytes>;
  // Few sums have a chain of additions for either value of a pair.
  constexpr int chains = rows * columns <= 4 ? 2 : 1, last = chains - 1;
  typename V::Floats sums[rows * columns * chains] = {};
  const auto* weights = p.weights + column * p.stride;
  int64_t k = 0;
  for (; k + V::kValues <= p.width; k += V::kValues) {
    typename V::Floats first[columns], second[columns], x, y;
    EACH for (int n = 0; n < columns; ++n)
        V::split(weights + n * p.stride + k, first[n], second[n]);
    EACH for (int m = 0; m < rows; ++m) {
      V::split(p.x + m * p.x_stride + k, x, y);
      EACH for (int n = 0; n < columns; ++n) {
        sums[(m * columns + n) * chains] += x * first[n];
        sums[(m * columns + n) * chains + last] += y * second[n];
      }
    }
  }
  EACH for (int m = 0; m < rows; ++m) EACH for (int n = 0; n < columns; ++n) {
    const auto* lanes = sums + (m * columns + n) * chains;
    float total = V::sum(chains == 1 ? lanes[0] : lanes[0] + lanes[last]);
    for (int64_t i = k; i < p.width; ++i)
      total += widened(p.x[m * p.x_stride + i]) * widened(weights[n * p.stride + i]);
    if (p.bias) total += widened(p.bias[column + n]);
    p.out[m * p.out_stride + column + n] = rounded<at::BFloat16>(total);
  }
}

template <int bytes, int rows> inline void widened_rows(const Product& p, int64_t columns) {
  constexpr int most = rows <= 2 ? 2 : bytes < 64 && rows > 4 ? 1 : rows <= 4 ? 2 : 3;
  int64_t n = 0;
  for (; n + most <= columns; n += most) widened_tile<bytes, rows, most>(p, n);
  for (; n < columns; ++n) widened_tile<bytes, rows, 1>(p, n);
}

template <int bytes> inline void widened_band(const Product& p, int64_t rows, int64_t columns) {
  [&]<int... more>(std::integer_sequence<int, more...>) {
    ((rows == more + 1 ? widened_rows<bytes, more + 1>(p, columns) : void()), ...);
  }(std::make_integer_sequence<int, 8>());
}

// Up to eight rows.
inline void widened_band(const Product& p, int64_t rows, int64_t columns) {
#if defined(__x86_64__)
  vector_unit() >= VectorUnit::avx512 ? with_avx512([&] { widened_band<64>(p, rows, columns); })
                                      : with_avx2([&] { widened_band<32>(p, rows, columns); });
#else
  widened_band<16>(p, rows, columns);
#endif
}

}  // namespace emu::bf16
