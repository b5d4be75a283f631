#include "skinny_matmul.h"

#include <ATen/Parallel.h>

#include <atomic>

#if defined(__x86_64__)
#include <immintrin.h>
#define BF16_VECTORS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#endif

namespace emu {

#if defined(__x86_64__)
// Tile loops are unrolled, so that the sums stay in registers.
#define EACH _Pragma("GCC unroll 8")

namespace {

constexpr int64_t kMostRows = 8;
constexpr int64_t kLanes = 32;     // bfloat16 values per step
constexpr int64_t kAhead = 16384;  // bytes

// out[m, n .. n + columns) for `rows` rows of self; sums of pairs go into float32 lanes.
template <int rows, int columns>
BF16_VECTORS void tile(const at::BFloat16* x, int64_t x_stride, const at::BFloat16* weights, int64_t stride, int64_t width,
    const at::BFloat16* bias, at::BFloat16* out, int64_t out_stride) {
  __m512 sums[rows][columns];
  EACH for (int m = 0; m < rows; ++m) EACH for (int n = 0; n < columns; ++n) sums[m][n] = _mm512_setzero_ps();
  // In the order of memory, which the loads of several columns are not. One row is fastest without.
  const auto* ahead = reinterpret_cast<const char*>(weights) + kAhead;
  for (int64_t k = 0; k < width; k += kLanes) {
    const __mmask32 mask = width - k >= kLanes ? ~__mmask32{0} : (__mmask32{1} << (width - k)) - 1;
    __m512bh w[columns];
    EACH for (int n = 0; n < columns; ++n) {
      const auto* from = weights + n * stride + k;
      w[n] = (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
      if (rows > 1) _mm_prefetch(ahead + n * sizeof(__m512), _MM_HINT_T1);
    }
    ahead += columns * sizeof(__m512);
    EACH for (int m = 0; m < rows; ++m) {
      const auto value = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + m * x_stride + k);
      EACH for (int n = 0; n < columns; ++n) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], value, w[n]);
    }
  }
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < columns; ++n)
      out[m * out_stride + n] = _mm512_reduce_add_ps(sums[m][n]) + (bias ? static_cast<float>(bias[n]) : 0.0f);
}

template <int rows>
void band(const at::BFloat16* x, int64_t x_stride, const at::BFloat16* weights, int64_t stride, int64_t width,
    const at::BFloat16* bias, at::BFloat16* out, int64_t out_stride, int64_t columns) {
  constexpr int most = rows <= 1 ? 1 : rows <= 4 ? 6 : 3;
  int64_t n = 0;
  for (; n + most <= columns; n += most)
    tile<rows, most>(x, x_stride, weights + n * stride, stride, width, bias ? bias + n : nullptr, out + n, out_stride);
  for (; n < columns; ++n)
    tile<rows, 1>(x, x_stride, weights + n * stride, stride, width, bias ? bias + n : nullptr, out + n, out_stride);
}

using Band = decltype(&band<1>);
constexpr Band kBands[] = {band<1>, band<2>, band<3>, band<4>, band<5>, band<6>, band<7>, band<8>};

bool has_bf16_vectors() {
  static const bool has =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  return has;
}

}  // namespace

bool is_skinny(const at::Tensor& self, const at::Tensor& other, const at::Tensor& out) {
  return has_bf16_vectors() && self.dim() == 2 && other.dim() == 2 && out.dim() == 2 && self.size(0) > 0 && self.size(1) > 0 &&
         self.size(0) <= kMostRows && self.scalar_type() == at::kBFloat16 && other.scalar_type() == at::kBFloat16 &&
         out.scalar_type() == at::kBFloat16 && self.size(1) == other.size(0) && out.size(0) == self.size(0) &&
         out.size(1) == other.size(1) && self.stride(1) == 1 && other.stride(0) == 1 && out.stride(1) == 1;
}

void skinny_matmul(const at::Tensor& self, const at::Tensor& other, const at::Tensor& bias, const at::Tensor& out) {
  const auto* x = self.const_data_ptr<at::BFloat16>();
  const auto* weights = other.const_data_ptr<at::BFloat16>();
  const auto added = bias.defined() ? bias.contiguous() : at::Tensor();
  const auto* offsets = added.defined() ? added.const_data_ptr<at::BFloat16>() : nullptr;
  auto* result = out.mutable_data_ptr<at::BFloat16>();
  const int64_t count = self.size(0), width = self.size(1), stride = other.stride(1);
  constexpr int64_t kBlock = 96;  // columns per task
  const int64_t columns = other.size(1), workers = columns * width < 1 << 16 ? 1 : at::get_num_threads();
  // Dynamic scheduling of blocks: the host's other threads may delay a worker.
  std::atomic<int64_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t n = next.fetch_add(kBlock); n < columns; n = next.fetch_add(kBlock))
      kBands[count - 1](x, self.stride(0), weights + n * stride, stride, width, offsets ? offsets + n : nullptr, result + n,
          out.stride(0), std::min(kBlock, columns - n));
  });
}

#else

bool is_skinny(const at::Tensor&, const at::Tensor&, const at::Tensor&) { return false; }
void skinny_matmul(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {}

#endif

}  // namespace emu
