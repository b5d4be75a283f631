// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Matmul of bfloat16 matrices. ATen reorders the weights at each call; here few rows, which
// dominate decoding, read them once in place, and many rows a block after the other, packed.
#pragma once
#include <ATen/core/Tensor.h>

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

}  // namespace emu
