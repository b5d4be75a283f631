// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "rows.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <numeric>

#include "operator/checks.h"
#include "ops/vectorized.h"

#define DISPATCH(NAME, TENSOR, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, TENSOR.scalar_type(), NAME, __VA_ARGS__)

namespace emu {
namespace {

using at::Tensor;

// Sixteen partial sums: more accurate, and one vector register.
template <class T> float sum_of_squares(const T* x, int64_t width) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = widened(x[i + lane]);
      lanes[lane] += value * value;
    }
  for (int lane = 0; i < width; ++i, ++lane) lanes[lane] += widened(x[i]) * widened(x[i]);
  for (int half = kLanes / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

template <class T> struct RmsNorm {
  const T *x, *added, *gamma;  // added may be null
  T *sum, *y;                  // sum: of x and added
  float* rstd;                 // may be null
  int64_t width;
  float epsilon;

  void row(int64_t row) const {
    const T* in = x + row * width;
    T* out = y + row * width;
    if (added) {
      const T* other = added + row * width;
      T* total = sum + row * width;
      for (int64_t i = 0; i < width; ++i) total[i] = rounded<T>(widened(in[i]) + widened(other[i]));
      in = total;
    }
    const float scale = 1.0f / std::sqrt(sum_of_squares(in, width) / width + epsilon);
    for (int64_t i = 0; i < width; ++i)
      out[i] = rounded<T>(widened(in[i]) * scale * widened(gamma[i]));
    if (rstd) rstd[row] = scale;
  }
  void rows(int64_t count) const {
    at::parallel_for(
        0, count, std::max<int64_t>(1, 16384 / width), [&](int64_t first, int64_t last) {
          vectorized([&, self = *this] {
            for (int64_t each = first; each < last; ++each) self.row(each);
          });
        });
  }
};

template <class T> void swiglu(const T* x, T* out, int64_t rows, int64_t half) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / half), [&](int64_t first, int64_t last) {
    vectorized([&] {
      for (int64_t row = first; row < last; ++row) {
        const T* gate = x + row * 2 * half;
        const T* up = gate + half;
        T* to = out + row * half;
        for (int64_t i = 0; i < half; ++i) {
          const float g = widened(gate[i]);
          to[i] = rounded<T>(g / (1.0f + exp_of(-g)) * widened(up[i]));
        }
      }
    });
  });
}

// Rotates the first `rotary` values of each head; cache rows are cos and sin of rotary / 2 angles.
template <bool neox, class T> void rope_heads(const T* in, T* out, const T* cos, const T* sin,
    int64_t heads, int64_t head_size, int64_t half) {
  for (int64_t head = 0; head < heads; ++head, in += head_size, out += head_size) {
    for (int64_t i = 0; i < half; ++i) {
      const int64_t a = neox ? i : 2 * i, b = neox ? i + half : 2 * i + 1;
      const float x = widened(in[a]), y = widened(in[b]), c = widened(cos[i]), s = widened(sin[i]);
      out[a] = rounded<T>(x * c - y * s);
      out[b] = rounded<T>(y * c + x * s);
    }
    for (int64_t i = 2 * half; i < head_size; ++i) out[i] = in[i];
  }
}

template <class T> void rope(const Tensor& positions, const Tensor& x, const Tensor& cache,
    int64_t head_size, bool neox, const Tensor& out) {
  const int64_t tokens = x.size(0), heads = x.size(1) / head_size, half = cache.size(1) / 2,
                limit = cache.size(0);
  const auto* where = positions.const_data_ptr<int64_t>();
  const T* table = cache.const_data_ptr<T>();
  const T* in = x.const_data_ptr<T>();
  T* result = out.mutable_data_ptr<T>();
  const int64_t stride = x.stride(0), out_stride = out.stride(0);
  at::parallel_for(0, tokens, 8, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      require(where[t] >= 0 && where[t] < limit, "position ", where[t],
          " is outside the cos/sin cache of ", limit, " rows");
    vectorized([&] {
      for (int64_t t = first; t < last; ++t) {
        const T* row = table + where[t] * 2 * half;
        const auto rotate = neox ? rope_heads<true, T> : rope_heads<false, T>;
        rotate(in + t * stride, result + t * out_stride, row, row + half, heads, head_size, half);
      }
    });
  });
}

template <class T> void add_weighted(const T* rows, int64_t count, const int32_t* row_numbers,
    const float* weights, int64_t k, const Tensor& sums) {
  const int64_t columns = sums.size(1);
  float* const out = sums.mutable_data_ptr<float>();
  at::parallel_for(0, sums.size(0), std::max<int64_t>(1, 65536 / std::max<int64_t>(1, k * columns)),
      [&](int64_t from, int64_t to) {
        vectorized([&] {
          for (int64_t i = from * k; i < to * k; ++i) {
            if (row_numbers[i] >= count) continue;
            const T* const row = rows + row_numbers[i] * columns;
            float* const sum = out + i / k * columns;
            const float weight = weights ? weights[i] : 1.0f;
            for (int64_t column = 0; column < columns; ++column)
              sum[column] += weight * widened(row[column]);
          }
        });
      });
}

}  // namespace

void rms_norm_rows(const Tensor& x, const Tensor& added, const Tensor& gamma, const Tensor& sum,
    const Tensor& y, const Tensor& rstd, double epsilon) {
  const int64_t width = gamma.numel();
  DISPATCH("rms_norm", x, [&] {
    RmsNorm<scalar_t>{x.const_data_ptr<scalar_t>(),
        added.defined() ? added.const_data_ptr<scalar_t>() : nullptr,
        gamma.const_data_ptr<scalar_t>(),
        added.defined() ? sum.mutable_data_ptr<scalar_t>() : nullptr,
        y.mutable_data_ptr<scalar_t>(), rstd.defined() ? rstd.mutable_data_ptr<float>() : nullptr,
        width, static_cast<float>(epsilon)}
        .rows(x.numel() / width);
  });
}

void swiglu_rows(const Tensor& x, const Tensor& out) {
  DISPATCH("swiglu", x, [&] {
    swiglu(x.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(),
        out.numel() / out.size(-1), out.size(-1));
  });
}

void rope_rows(const Tensor& positions, const Tensor& x, const Tensor& cache, int64_t head_size,
    bool neox, const Tensor& out) {
  DISPATCH("rope", x, [&] { rope<scalar_t>(positions, x, cache, head_size, neox, out); });
}

void add_weighted_rows(const Tensor& rows, const Tensor& row_numbers, const Tensor& weights,
    int64_t k, const Tensor& sums) {
  DISPATCH("unpermute", rows, [&] {
    add_weighted(rows.const_data_ptr<scalar_t>(), rows.size(0),
        row_numbers.const_data_ptr<int32_t>(),
        weights.defined() ? weights.const_data_ptr<float>() : nullptr, k, sums);
  });
}

Tensor top_of_rows(const Tensor& scores, int64_t k) {
  const auto contiguous = scores.contiguous();
  const int64_t count = scores.size(-1), rows = count ? scores.numel() / count : 0;
  auto sizes = scores.sizes().vec();
  sizes.back() = k;
  const auto indices = at::empty(sizes, at::kLong);
  const auto* const values = contiguous.const_data_ptr<float>();
  auto* const out = indices.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / count), [&](int64_t first, int64_t last) {
    std::vector<int64_t> order(count);
    for (int64_t row = first; row < last; ++row) {
      const float* const of = values + row * count;
      const auto before = [of](int64_t a, int64_t b) {  // NaN first, as at::sort has it
        const bool a_nan = std::isnan(of[a]), b_nan = std::isnan(of[b]);
        if (a_nan != b_nan) return a_nan;
        return of[a] > of[b] || (!(of[a] < of[b]) && a < b);
      };
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
      std::copy_n(order.begin(), k, out + row * k);
    }
  });
  return indices;
}

}  // namespace emu
