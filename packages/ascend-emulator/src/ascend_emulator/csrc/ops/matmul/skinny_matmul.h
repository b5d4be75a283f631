// Product of few rows and a large bfloat16 matrix, which dominates decoding. ATen reorders the weights at each call; reading them
// once in place is about twice as fast.
#ifndef ASCEND_EMULATOR_OPS_MATMUL_SKINNY_MATMUL_H
#define ASCEND_EMULATOR_OPS_MATMUL_SKINNY_MATMUL_H
#include <ATen/ATen.h>

namespace emu {

// Whether out = self @ other is supported: self [M, K] bfloat16 with few rows, other the transposed view of a row-major [N, K]
// matrix, out [M, N] row-major.
bool is_skinny(const at::Tensor& self, const at::Tensor& other, const at::Tensor& out);

// out = self @ other + bias; bias [N] bfloat16 or undefined. Sums in float32.
void skinny_matmul(const at::Tensor& self, const at::Tensor& other, const at::Tensor& bias, const at::Tensor& out);

}  // namespace emu

#endif  // ASCEND_EMULATOR_OPS_MATMUL_SKINNY_MATMUL_H
