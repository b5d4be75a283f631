// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "bf16_matmul.h"

#include <ATen/Parallel.h>

#include <atomic>

#include "bf16_tile.h"
#include "widened_tile.h"

namespace emu {

namespace {

using bf16::Product;

constexpr int64_t kMostRows = 64;  // in place; packed weights are faster for more
constexpr int64_t kMostBytes =
    512 << 10;  // of more rows than one tile has: they stay in the second-level cache
constexpr int64_t kRowsOfOneTile = 8, kRowsOfTiles = 6, kFirstLevel = 36 << 10;

#if defined(__x86_64__)

template <int rows, int columns> void store_tile(const Product& p, int64_t n, bool from_memory) {
  float sums[(rows * columns + 3) / 4 * 4];
  bf16::tile<rows, columns>(
      p.x, p.x_stride, p.weights + n * p.stride, p.stride, p.width, from_memory, sums);
  for (int i = 0; i < columns; ++i) {
    const float added = p.bias ? static_cast<float>(p.bias[n + i]) : 0.0f;
    for (int m = 0; m < rows; ++m) p.out[m * p.out_stride + n + i] = sums[m * columns + i] + added;
  }
}

template <int rows> void band(const Product& p, int64_t columns, bool from_memory) {
  constexpr int most = rows <= 1 ? 1 : rows <= 4 ? 6 : rows <= 6 ? 4 : 3;
  int64_t n = 0;
  for (; n + most <= columns; n += most) store_tile<rows, most>(p, n, from_memory);
  for (; n < columns; ++n) store_tile<rows, 1>(p, n, from_memory);
}

using Band = decltype(&band<1>);
constexpr Band kBands[] = {band<1>, band<2>, band<3>, band<4>, band<5>, band<6>, band<7>, band<8>};

#else
constexpr void (*const* kBands)(const Product&, int64_t, bool) = nullptr;
#endif

// Rows in bands of about the same height: the first one reads the weights from memory, the others
// from the cache.
void bands(Product p, int64_t rows, int64_t columns) {
  bool from_memory = true;
  const bool one = rows <= kRowsOfOneTile && rows * p.width * 2 <= kFirstLevel;
  for (int64_t left = one ? 1 : (rows + kRowsOfTiles - 1) / kRowsOfTiles; left; --left) {
    const int64_t height = (rows + left - 1) / left;
    if (bf16::has_vectors()) kBands[height - 1](p, columns, from_memory);
    else bf16::widened_band(p, height, columns);
    p = p.from_row(height);
    rows -= height;
    from_memory = false;
  }
}

}  // namespace

bool has_bf16_matmul(const at::Tensor& self, const at::Tensor& other, const at::Tensor& out) {
  return (bf16::has_vectors() || bf16::has_widened_tiles()) && self.dim() == 2 &&
         other.dim() == 2 && out.dim() == 2 && self.numel() > 0 &&
         self.scalar_type() == at::kBFloat16 && other.scalar_type() == at::kBFloat16 &&
         out.scalar_type() == at::kBFloat16 && self.size(1) == other.size(0) &&
         out.size(0) == self.size(0) && out.size(1) == other.size(1) && self.stride(1) == 1 &&
         (other.stride(0) == 1 ||
             (bf16::has_vectors() && other.stride(1) == 1 && self.size(0) > kMostRows)) &&
         out.stride(1) == 1;
}

void bf16_matmul(const at::Tensor& self, const at::Tensor& other, const at::Tensor& bias,
    const at::Tensor& out) {
  bf16_matmuls({{self, other, bias.defined() ? bias.contiguous() : bias, out}});
}

void bf16_matmuls(const std::vector<BF16Product>& products) {
  struct InPlace {
    Product product;
    int64_t rows, columns, first;  // first: of its tasks
  };
  constexpr int64_t kBlock = 96;  // columns per task
  std::vector<InPlace> parts;
  int64_t tasks = 0, values = 0;
  for (const auto& [self, other, bias, out] : products) {
    const bool transposed = other.stride(0) == 1;
    const Product whole{self.const_data_ptr<at::BFloat16>(), other.const_data_ptr<at::BFloat16>(),
        bias.defined() ? bias.const_data_ptr<at::BFloat16>() : nullptr,
        out.mutable_data_ptr<at::BFloat16>(), self.stride(0), other.stride(transposed ? 1 : 0),
        out.stride(0), self.size(1), transposed};
    const int64_t rows = self.size(0), columns = other.size(1);
    if (bf16::has_vectors() &&
        (rows > kMostRows || (rows > kRowsOfOneTile && rows * whole.width * 2 > kMostBytes))) {
      bf16::packed_matmul(whole, rows, columns);
      continue;
    }
    parts.push_back({whole, rows, columns, tasks});
    tasks += (columns + kBlock - 1) / kBlock;
    values += columns * whole.width;
  }
  if (parts.empty()) return;
  const int64_t workers = values < 1 << 16 ? 1 : at::get_num_threads();
  // Dynamic scheduling of blocks: the host's other threads may delay a worker.
  std::atomic<int64_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    auto part = parts.begin();
    for (int64_t task = next++; task < tasks; task = next++) {
      while (part + 1 != parts.end() && task >= (part + 1)->first) ++part;
      const int64_t n = (task - part->first) * kBlock;
      bands(part->product.from_column(n), part->rows, std::min(kBlock, part->columns - n));
    }
  });
}

}  // namespace emu
