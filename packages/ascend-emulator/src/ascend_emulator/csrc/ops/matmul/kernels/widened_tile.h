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
    if constexpr (bytes > 16) {
      typename Vectors<bytes / 2>::Floats halves[2];
      std::memcpy(halves, &lanes, bytes);
      return Vectors<bytes / 2>::sum(halves[0] + halves[1]);
    } else {
      float all[4];
      std::memcpy(all, &lanes, sizeof(all));
      return (all[0] + all[2]) + (all[1] + all[3]);
    }
  }
};

// steps: vectors that a turn of the loop takes of a row, each with sums of its own, because an
// addition waits for the one before.
template <int bytes, int rows, int columns, int steps = 1>
inline void widened_tile(const Product& p, int64_t column) {
  using V = Vectors<bytes>;
  constexpr int64_t turn = V::kValues * steps;
  constexpr int chains = rows * columns <= 4 ? 2 * steps : steps, last = chains > steps;
  typename V::Floats sums[rows * columns][chains] = {};
  const auto* weights = p.weights + column * p.stride;
  const auto* ahead = reinterpret_cast<const char*>(weights) + kAhead;
  int64_t k = 0;
  for (; k + turn <= p.width; k += turn, ahead += columns * steps * bytes) {
    // In the order of memory, which the loads of several columns are not.
    if constexpr (columns > 1)
      EACH for (int i = 0; i < columns * bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    EACH for (int step = 0; step < steps; ++step) {
      const int64_t at = k + step * V::kValues, chain = step * (1 + last);
      typename V::Floats first[columns], second[columns], x, y;
      EACH for (int n = 0; n < columns; ++n)
          V::split(weights + n * p.stride + at, first[n], second[n]);
      EACH for (int m = 0; m < rows; ++m) {
        V::split(p.x + m * p.x_stride + at, x, y);
        EACH for (int n = 0; n < columns; ++n) {
          sums[m * columns + n][chain] += x * first[n];
          sums[m * columns + n][chain + last] += y * second[n];
        }
      }
    }
  }
  EACH for (int m = 0; m < rows; ++m) EACH for (int n = 0; n < columns; ++n) {
    auto lanes = sums[m * columns + n][0];
    EACH for (int i = 1; i < chains; ++i) lanes += sums[m * columns + n][i];
    float total = V::sum(lanes);
    for (int64_t i = k; i < p.width; ++i)
      total += widened(p.x[m * p.x_stride + i]) * widened(weights[n * p.stride + i]);
    if (p.bias) total += widened(p.bias[column + n]);
    p.out[m * p.out_stride + column + n] = rounded<at::BFloat16>(total);
  }
}

// One or two rows are fastest with one column at a time, which is the order of memory.
template <int bytes, int rows> inline void widened_rows(const Product& p, int64_t columns) {
  constexpr int steps = rows <= 2 ? 2 : 1, most = rows <= 2    ? 1
                                                  : bytes > 32 ? 3
                                                               : (rows <= 4 ? 2 : 1);
  int64_t n = 0;
  for (; n + most <= columns; n += most) widened_tile<bytes, rows, most, steps>(p, n);
  if constexpr (most > 1)
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
