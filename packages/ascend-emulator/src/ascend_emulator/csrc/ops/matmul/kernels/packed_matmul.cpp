// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <atomic>

#include "bf16_tile.h"

namespace emu::bf16 {

#if defined(__x86_64__)
namespace {

constexpr int64_t kColumns = 64;  // of a block, which is packed as [K / 2][64][2], stays in the
                                  // second-level cache and serves all rows
constexpr int kHeight = 6;        // rows per tile
constexpr int kVectors = kColumns / 16;

// Sixteen rows of sixteen pairs, transposed.
BF16_VECTORS inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  EACH for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  EACH for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  EACH for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  EACH for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

// Columns [0, columns) of weights, which are rows of `width` values, to pairs [k / 2][64]; zeros
// beside them.
BF16_VECTORS void pack(
    const at::BFloat16* weights, int64_t stride, int64_t width, int64_t columns, __m512i* into) {
  for (int64_t k = 0; k < width; k += kLanes) {
    const __mmask32 mask = width - k >= kLanes ? ~__mmask32{0} : (__mmask32{1} << (width - k)) - 1;
    const int64_t pairs = std::min<int64_t>(16, (width - k + 1) / 2);
    for (int64_t n = 0; n < kColumns; n += 16) {
      __m512i r[16];
      EACH for (int i = 0; i < 16; ++i) r[i] =
          n + i < columns ? _mm512_maskz_loadu_epi16(mask, weights + (n + i) * stride + k)
                          : _mm512_setzero_si512();
      transpose(r);
      auto* to = into + k / 2 * kVectors + n / 16;
      if (pairs == 16) {
        EACH for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * kVectors, r[i]);
      } else {
        for (int64_t i = 0; i < pairs; ++i) _mm512_store_si512(to + i * kVectors, r[i]);
      }
    }
  }
}

// The same of weights [K, N].
BF16_VECTORS void pack_row_major(
    const at::BFloat16* weights, int64_t stride, int64_t width, int64_t columns, __m512i* into) {
  alignas(64) uint16_t order[kLanes];
  for (int i = 0; i < 16; ++i) order[2 * i] = i, order[2 * i + 1] = kLanes + i;
  const auto first = _mm512_load_si512(order),
             last = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int64_t k = 0; k < width; k += 2)
    for (int64_t n = 0; n < kColumns; n += kLanes, into += 2) {
      const int64_t left = std::max<int64_t>(0, columns - n);
      const __mmask32 mask = left >= kLanes ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      const auto even = _mm512_maskz_loadu_epi16(mask, weights + k * stride + n);
      const auto odd = k + 1 < width
                           ? _mm512_maskz_loadu_epi16(mask, weights + (k + 1) * stride + n)
                           : _mm512_setzero_si512();
      _mm512_store_si512(into, _mm512_permutex2var_epi16(even, first, odd));
      _mm512_store_si512(into + 1, _mm512_permutex2var_epi16(even, last, odd));
    }
}

template <int rows>
BF16_VECTORS void tile(const Product& p, const __m512i* packed, int64_t columns) {
  __m512 sums[rows * kVectors];
  EACH for (int i = 0; i < rows * kVectors; ++i) sums[i] = _mm512_setzero_ps();
  const auto add = [&](int64_t pair, const auto& load) BF16_INLINE {
    __m512bh w[kVectors];
    EACH for (int v = 0; v < kVectors; ++v) w[v] =
        (__m512bh)_mm512_load_si512(packed + pair * kVectors + v);
    EACH for (int m = 0; m < rows; ++m) {
      const auto value = (__m512bh)_mm512_set1_epi32(load(p.x + m * p.x_stride + pair * 2));
      EACH for (int v = 0; v < kVectors; ++v) sums[m * kVectors + v] =
          _mm512_dpbf16_ps(sums[m * kVectors + v], value, w[v]);
    }
  };
  const int64_t pairs = p.width / 2;
  for (int64_t pair = 0; pair < pairs; ++pair)
    add(pair, [](const at::BFloat16* x) BF16_INLINE {
      int both;
      std::memcpy(&both, x, sizeof(both));
      return both;
    });
  if (p.width % 2) add(pairs, [](const at::BFloat16* x) BF16_INLINE { return int{x->x}; });
  EACH for (int v = 0; v < kVectors; ++v) {
    const int64_t left = columns - v * 16;
    if (left <= 0) break;
    const __mmask16 mask = left >= 16 ? 0xFFFF : (1u << left) - 1;
    const auto bias =
        p.bias ? _mm512_castsi512_ps(_mm512_slli_epi32(
                     _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p.bias + v * 16)), 16))
               : _mm512_setzero_ps();
    EACH for (int m = 0; m < rows; ++m) _mm256_mask_storeu_epi16(p.out + m * p.out_stride + v * 16,
        mask, (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[m * kVectors + v], bias)));
  }
}

using Tile = decltype(&tile<1>);
constexpr Tile kTiles[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

}  // namespace

void packed_matmul(const Product& whole, int64_t rows, int64_t columns) {
  const int64_t blocks = (columns + kColumns - 1) / kColumns, threads = at::get_num_threads();
  // Rows in parts if the columns are too few for the threads; each part packs the weights.
  const int64_t parts = std::clamp<int64_t>(threads * 4 / blocks, 1, (rows + 95) / 96),
                height = (rows + parts - 1) / parts;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const auto packed = at::empty({(whole.width + 1) / 2 * kVectors + 1, 16}, at::kInt);
    auto* const aligned = reinterpret_cast<__m512i*>(
        (reinterpret_cast<uintptr_t>(packed.mutable_data_ptr()) + 63) / 64 * 64);
    for (int64_t task = next++, after; task < blocks * parts; task = after) {
      after = next++;
      auto p = whole.from_column(task / parts * kColumns).from_row(task % parts * height);
      const int64_t n = std::min(kColumns, columns - task / parts * kColumns),
                    first = task % parts * height;
      const int64_t last = std::min(rows, first + height),
                    tiles = (last - first + kHeight - 1) / kHeight;
      (p.transposed ? pack : pack_row_major)(p.weights, p.stride, p.width, n, aligned);
      // The weights of this thread's next block are read from memory meanwhile.
      const auto upcoming =
          whole.from_column(std::min(after, blocks * parts - 1) / parts * kColumns);
      const int64_t lines =
          whole.transposed ? (whole.width + kLanes - 1) / kLanes : kColumns / kLanes;
      const int64_t all =
          after < blocks * parts ? lines * (whole.transposed ? kColumns : whole.width) : 0;
      int64_t line = 0;
      for (int64_t m = first, tile = 1; m < last; m += kHeight, ++tile) {
        for (; line < all * tile / tiles; ++line)
          _mm_prefetch(
              upcoming.weights + line / lines * whole.stride + line % lines * kLanes, _MM_HINT_T1);
        kTiles[std::min<int64_t>(kHeight, last - m) - 1](p, aligned, n);
        p = p.from_row(kHeight);
      }
    }
  });
}

#else

void packed_matmul(const Product&, int64_t, int64_t) {}

#endif

}  // namespace emu::bf16
