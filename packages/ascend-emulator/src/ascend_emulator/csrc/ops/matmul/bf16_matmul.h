// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Matmul of bfloat16 matrices. ATen reorders the weights at each call; here few rows, which
// dominate decoding, read them once in place, and many rows a block after the other, packed.
#pragma once
#include <ATen/ATen.h>

namespace emu {

// Whether out = self @ other is supported: self [M, K] and out [M, N] row-major, other the
// transposed view of [N, K], or [K, N] beside more than a few rows, in bfloat16.
bool has_bf16_matmul(const at::Tensor& self, const at::Tensor& other, const at::Tensor& out);

// out = self @ other + bias; bias [N] bfloat16 or undefined. Sums in float32.
void bf16_matmul(
    const at::Tensor& self, const at::Tensor& other, const at::Tensor& bias, const at::Tensor& out);

// The same for several matmuls, whose outputs do not overlap, by all threads at once; a bias is
// contiguous.
struct BF16Product {
  at::Tensor self, other, bias, out;
};
void bf16_matmuls(const std::vector<BF16Product>& products);

namespace bf16 {

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

}  // namespace bf16

}  // namespace emu
