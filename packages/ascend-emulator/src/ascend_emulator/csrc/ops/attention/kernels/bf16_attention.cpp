// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "bf16_attention.h"

#include <ATen/Parallel.h>

#include <atomic>

#include "ops/matmul/kernels/bf16_tile.h"
#include "ops/matmul/kernels/widened_tile.h"
#include "ops/vectorized.h"

namespace emu::attention::kernels {

namespace {

using at::BFloat16;
constexpr int64_t kMostWidth = 256, kKeys = 128;  // keys per step
constexpr int64_t kRows = 30;                     // queries times heads of a group per task
constexpr int kBand = 6;                          // rows per tile
constexpr int64_t kAhead = 16;                    // tokens
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Task {
  const Request* request;
  int64_t group, first, count;  // rows: query * share + head of the group
};

struct Buffers {
  alignas(64) BFloat16 query[kRows * kMostWidth];
  alignas(64) float scores[kRows * kKeys];
  alignas(64) BFloat16 weights[kRows * kKeys];
  alignas(64) float out[kRows * kMostWidth];
  float most[kRows], sum[kRows];
};

const BFloat16* row(const Rows& rows, int64_t group, int64_t token) {
  const int64_t block = rows.blocks ? rows.blocks[token / rows.block_size] : 0,
                place = rows.blocks ? token % rows.block_size : token;
  return rows.base + block * rows.block_stride + place * rows.stride + group * rows.group_stride;
}

// Calls with the parts of the tokens [first, last) that lie in one block each.
template <class Part>
void in_blocks(const Rows& rows, int64_t first, int64_t last, const Part& part) {
  for (int64_t token = first; token < last;) {
    const int64_t end =
        rows.blocks ? std::min(last, (token / rows.block_size + 1) * rows.block_size) : last;
    part(token, end);
    token = end;
  }
}

#if defined(__x86_64__)
// e^x of x <= 0 within two ulps: Cephes' polynomial.
BF16_VECTORS inline __m512 exp_of(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);  // for -infinity; what is not a number stays
  const auto n = _mm512_roundscale_ps(
      _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT);
  auto r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  auto p = _mm512_set1_ps(1.9875691500e-4f);
  for (const float term :
      {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r), _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

template <int rows, int columns> void put_scores(
    const BFloat16* query, int64_t width, const BFloat16* keys, int64_t stride, float* scores) {
  float sums[(rows * columns + 3) / 4 * 4];
  bf16::tile<rows, columns>(query, width, keys, stride, width, false, sums);
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < columns; ++n) scores[m * kKeys + n] = sums[m * columns + n];
}

// scores[rows][count] of keys in one block.
template <int rows> void score(const BFloat16* query, int64_t width, const BFloat16* keys,
    int64_t stride, int64_t count, float* scores) {
  int64_t n = 0;
  for (; n + 4 <= count; n += 4) {
    for (int64_t i = 0; i < 4; ++i)  // keys of one group are apart, which the CPU does not foresee
      for (int64_t d = 0; d < width; d += bf16::kLanes)
        __builtin_prefetch(keys + (n + kAhead + i) * stride + d);
    put_scores<rows, 4>(query, width, keys + n * stride, stride, scores + n);
  }
  for (; n < count; ++n) put_scores<rows, 1>(query, width, keys + n * stride, stride, scores + n);
}

// out[rows][32 * vectors] += weights[rows][count] values[count][...], of values in one block; pairs
// of tokens are interleaved.
template <int rows, int vectors> BF16_VECTORS void add_values(const BFloat16* weights,
    const BFloat16* values, int64_t stride, int64_t count, float* out, int64_t width) {
  __m512 sums[rows * vectors * 2];
  // Of each 32 columns the interleaved halves hold the first and the last four of each eight.
  const auto first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const auto last = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  EACH for (int i = 0; i < rows * vectors * 2; ++i) sums[i] = _mm512_setzero_ps();
  for (int64_t t = 0; t < count; t += 2) {
    const auto* even = values + t * stride;
    EACH for (int v = 0; v < vectors; ++v) {
      __builtin_prefetch(even + kAhead * stride + v * bf16::kLanes);
      __builtin_prefetch(even + (kAhead + 1) * stride + v * bf16::kLanes);
    }
    const bool pair = t + 1 < count;
    __m512bh low[vectors], high[vectors];
    EACH for (int v = 0; v < vectors; ++v) {
      const auto a = _mm512_loadu_si512(even + v * bf16::kLanes);
      const auto b =
          pair ? _mm512_loadu_si512(even + stride + v * bf16::kLanes) : _mm512_setzero_si512();
      low[v] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      high[v] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    EACH for (int m = 0; m < rows; ++m) {
      uint32_t both;
      std::memcpy(&both, weights + m * kKeys + t, sizeof(both));
      if (!pair) both &= 0xFFFF;
      const auto weight = (__m512bh)_mm512_set1_epi32(static_cast<int>(both));
      EACH for (int v = 0; v < vectors; ++v) {
        sums[(m * vectors + v) * 2] = _mm512_dpbf16_ps(sums[(m * vectors + v) * 2], weight, low[v]);
        sums[(m * vectors + v) * 2 + 1] =
            _mm512_dpbf16_ps(sums[(m * vectors + v) * 2 + 1], weight, high[v]);
      }
    }
  }
  EACH for (int m = 0; m < rows; ++m) EACH for (int v = 0; v < vectors; ++v) {
    auto* to = out + m * width + v * bf16::kLanes;
    const auto low = sums[(m * vectors + v) * 2], high = sums[(m * vectors + v) * 2 + 1];
    _mm512_storeu_ps(
        to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_permutex2var_ps(low, first, high)));
    _mm512_storeu_ps(
        to + 16, _mm512_add_ps(_mm512_loadu_ps(to + 16), _mm512_permutex2var_ps(low, last, high)));
  }
}

template <int rows> void weigh(const BFloat16* weights, const BFloat16* values, int64_t stride,
    int64_t count, float* out, int64_t width) {
  int64_t column = 0;
  for (; column + 64 <= width; column += 64)
    add_values<rows, 2>(weights, values + column, stride, count, out + column, width);
  if (column < width)
    add_values<rows, 1>(weights, values + column, stride, count, out + column, width);
}

using Score = decltype(&score<1>);
using Weigh = decltype(&weigh<1>);
constexpr Score kScore[] = {score<1>, score<2>, score<3>, score<4>, score<5>, score<6>};
constexpr Weigh kWeigh[] = {weigh<1>, weigh<2>, weigh<3>, weigh<4>, weigh<5>, weigh<6>};

// Scores of a row, of which [from, to) are seen, to weights; the former sum and output are scaled
// to the new maximum.
BF16_VECTORS void soften(
    Buffers& b, int64_t m, int64_t count, int64_t from, int64_t to, float scale, int64_t width) {
  auto* scores = b.scores + m * kKeys;
  auto* weights = b.weights + m * kKeys;
  std::memset(static_cast<void*>(weights), 0, (count + 1) / 2 * 2 * sizeof(BFloat16));
  if (from >= to) return;
  auto largest = _mm512_set1_ps(-kInfinity);
  for (int64_t n = from; n < to; n += 16) {
    const __mmask16 mask = to - n >= 16 ? 0xFFFF : (1u << (to - n)) - 1;
    largest = _mm512_mask_max_ps(largest, mask, largest, _mm512_maskz_loadu_ps(mask, scores + n));
  }
  const float most = std::max(b.most[m], _mm512_reduce_max_ps(largest) * scale);
  auto sum = _mm512_setzero_ps();
  const auto shift = _mm512_set1_ps(-most), factor = _mm512_set1_ps(scale);
  for (int64_t n = from; n < to; n += 16) {
    const __mmask16 mask = to - n >= 16 ? 0xFFFF : (1u << (to - n)) - 1;
    const auto value = _mm512_maskz_mov_ps(
        mask, exp_of(_mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, scores + n), factor, shift)));
    sum = _mm512_add_ps(sum, value);
    _mm256_mask_storeu_epi16(weights + n, mask, (__m256i)_mm512_cvtneps_pbh(value));
  }
  const float fade = b.most[m] == -kInfinity ? 0.0f : std::exp(b.most[m] - most);
  b.most[m] = most;
  b.sum[m] = b.sum[m] * fade + _mm512_reduce_add_ps(sum);
  if (fade == 1.0f) return;
  const auto faded = _mm512_set1_ps(fade);
  for (int64_t i = 0; i < width; i += 16)
    _mm512_storeu_ps(
        b.out + m * width + i, _mm512_mul_ps(_mm512_loadu_ps(b.out + m * width + i), faded));
}

// By AVX512_BF16.
struct Native {
  static void score(int64_t rows, const BFloat16* query, int64_t width, const BFloat16* keys,
      int64_t stride, int64_t count, float* scores) {
    kScore[rows - 1](query, width, keys, stride, count, scores);
  }
  static void weigh(int64_t rows, const BFloat16* weights, const BFloat16* values, int64_t stride,
      int64_t count, float* out, int64_t width) {
    kWeigh[rows - 1](weights, values, stride, count, out, width);
  }
  static constexpr auto soften = kernels::soften;
};
#endif

// By vectors of the compiler, in which bfloat16 is widened.
template <int bytes> struct Widened {
  using V = bf16::Vectors<bytes>;
  using Floats = typename V::Floats;

  static void score(int64_t rows, const BFloat16* query, int64_t width, const BFloat16* keys,
      int64_t stride, int64_t count, float* scores) {
    for (int64_t n = 0; n < count; ++n) {
      const auto* key = keys + n * stride;
      for (int64_t d = 0; d < width; d += bf16::kLanes)  // keys of one group are apart
        __builtin_prefetch(key + kAhead * stride + d);
      for (int64_t m = 0; m < rows; ++m) {
        Floats first{}, second{}, x, y, k, l;
        for (int64_t d = 0; d < width; d += V::kValues) {
          V::split(query + m * width + d, x, y);
          V::split(key + d, k, l);
          first += x * k;
          second += y * l;
        }
        scores[m * kKeys + n] = V::sum(first + second);
      }
    }
  }

  static void weigh(int64_t rows, const BFloat16* weights, const BFloat16* values, int64_t stride,
      int64_t count, float* out, int64_t width) {
    for (int64_t column = 0; column < width; column += V::kValues) {
      Floats first[kBand] = {}, second[kBand] = {}, even, odd;
      for (int64_t t = 0; t < count; ++t) {
        __builtin_prefetch(values + (t + kAhead) * stride + column);
        V::split(values + t * stride + column, even, odd);
        for (int m = 0; m < kBand; ++m) {
          const float weight = m < rows ? widened(weights[m * kKeys + t]) : 0.0f;
          first[m] += weight * even;
          second[m] += weight * odd;
        }
      }
      for (int64_t m = 0; m < rows; ++m)
        for (int i = 0; i < bytes / 4; ++i) {
          out[m * width + column + 2 * i] += first[m][i];
          out[m * width + column + 2 * i + 1] += second[m][i];
        }
    }
  }

  static void soften(
      Buffers& b, int64_t m, int64_t count, int64_t from, int64_t to, float scale, int64_t width) {
    auto *scores = b.scores + m * kKeys, *out = b.out + m * width;
    auto* weights = b.weights + m * kKeys;
    std::memset(static_cast<void*>(weights), 0, count * sizeof(BFloat16));
    if (from >= to) return;
    float most = b.most[m] / scale, sum = 0;
    for (int64_t n = from; n < to; ++n) most = scores[n] > most ? scores[n] : most;
    most *= scale;
    for (int64_t n = from; n < to; ++n) scores[n] = emu::exp_of(scores[n] * scale - most);
    for (int64_t n = from; n < to; ++n) sum += scores[n];
    for (int64_t n = from; n < to; ++n) weights[n] = rounded<BFloat16>(scores[n]);
    const float fade = b.most[m] == -kInfinity ? 0.0f : std::exp(b.most[m] - most);
    b.most[m] = most;
    b.sum[m] = b.sum[m] * fade + sum;
    if (fade == 1.0f) return;
    for (int64_t i = 0; i < width; ++i) out[i] *= fade;
  }
};

template <class Unit> __attribute__((always_inline)) inline void run_task(
    const Task& task, int64_t share, float scale, Buffers& b) {
  const auto& r = *task.request;
  const int64_t width = r.query.size(2), value_width = r.out.size(2);
  const auto query_of = [&](int64_t m) { return (task.first + m) / share; };
  const auto head_of = [&](int64_t m) { return task.group * share + (task.first + m) % share; };
  const auto first_key = [&](int64_t m) { return std::max<int64_t>(0, query_of(m) - r.before); };
  const auto last_key = [&](int64_t m) {
    return std::max<int64_t>(0, std::min(r.keys, query_of(m) + r.after + 1));
  };
  for (int64_t m = 0; m < task.count; ++m) {
    std::memcpy(static_cast<void*>(b.query + m * width),
        r.query.const_data_ptr<BFloat16>() + head_of(m) * r.query.stride(0) +
            query_of(m) * r.query.stride(1),
        width * sizeof(BFloat16));
    b.most[m] = -kInfinity;
    b.sum[m] = 0;
  }
  std::memset(b.out, 0, task.count * value_width * sizeof(float));
  const int64_t end = last_key(task.count - 1);
  for (int64_t begin = first_key(0); begin < end; begin += kKeys) {
    const int64_t count = std::min(kKeys, end - begin);
    for (int64_t m = 0; m < task.count; m += kBand) {
      const auto rows = std::min<int64_t>(kBand, task.count - m);
      in_blocks(r.key, begin, begin + count, [&](int64_t token, int64_t last) {
        Unit::score(rows, b.query + m * width, width, row(r.key, task.group, token), r.key.stride,
            last - token, b.scores + m * kKeys + token - begin);
      });
    }
    for (int64_t m = 0; m < task.count; ++m)
      Unit::soften(b, m, count, std::clamp<int64_t>(first_key(m) - begin, 0, count),
          std::clamp<int64_t>(last_key(m) - begin, 0, count), scale, value_width);
    for (int64_t m = 0; m < task.count; m += kBand) {
      const auto rows = std::min<int64_t>(kBand, task.count - m);
      in_blocks(r.value, begin, begin + count, [&](int64_t token, int64_t last) {
        Unit::weigh(rows, b.weights + m * kKeys + token - begin, row(r.value, task.group, token),
            r.value.stride, last - token, b.out + m * value_width, value_width);
      });
    }
  }
  for (int64_t m = 0; m < task.count; ++m) {
    auto* to = r.out.mutable_data_ptr<BFloat16>() + head_of(m) * r.out.stride(0) +
               query_of(m) * r.out.stride(1);
    const float inverse = b.sum[m] == 0 ? 0.0f : 1 / b.sum[m];
    for (int64_t i = 0; i < value_width; ++i)
      to[i] = rounded<BFloat16>(b.out[m * value_width + i] * inverse);
    if (r.lse.defined())
      r.lse
          .mutable_data_ptr<float>()[head_of(m) * r.lse.stride(0) + query_of(m) * r.lse.stride(1)] =
          b.sum[m] == 0 ? kInfinity : b.most[m] + std::log(b.sum[m]);
  }
}

void run(const Task& task, int64_t share, float scale, Buffers& b) {
#if defined(__x86_64__)
  const auto native = [&]() BF16_VECTORS { run_task<Native>(task, share, scale, b); };
  bf16::has_vectors() ? native()
  : vector_unit() >= VectorUnit::avx512
      ? with_avx512([&] { run_task<Widened<64>>(task, share, scale, b); })
      : with_avx2([&] { run_task<Widened<32>>(task, share, scale, b); });
#else
  run_task<Widened<16>>(task, share, scale, b);
#endif
}

}  // namespace

bool has_attention(int64_t width, int64_t value_width) {
  return (bf16::has_vectors() || bf16::has_widened_tiles()) && width % bf16::kLanes == 0 &&
         value_width % bf16::kLanes == 0 && width <= kMostWidth && value_width <= kMostWidth;
}

void attend(const std::vector<Request>& requests, int64_t heads, int64_t groups, double scale) {
  const int64_t share = heads / groups;
  std::vector<Task> tasks;
  int64_t work = 0;
  for (const auto& request : requests) {
    const int64_t rows = request.query.size(1) * share,
                  most = std::max(share, kRows / share * share);
    for (int64_t first = 0; first < rows; first += most)
      for (int64_t group = 0; group < groups; ++group)
        for (int64_t part = first; part < std::min(rows, first + most); part += kRows)
          tasks.push_back(
              {&request, group, part, std::min({kRows, rows - part, first + most - part})});
    work += rows * groups * request.keys;
  }
  std::atomic<size_t> next{0};
  at::parallel_for(0, work < 1 << 10 ? 1 : at::get_num_threads(), 1, [&](int64_t, int64_t) {
    const auto buffers = std::make_unique<Buffers>();
    for (size_t i = next++; i < tasks.size(); i = next++)
      run(tasks[i], share, static_cast<float>(scale), *buffers);
  });
}

}  // namespace emu::attention::kernels
