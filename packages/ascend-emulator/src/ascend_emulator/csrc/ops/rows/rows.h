// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Operators on rows as loops, which ATen has not or has in several passes. Floating tensors are
// float32, float16 or bfloat16, all of one dtype, and contiguous unless it says otherwise.
#pragma once
#include <ATen/core/Tensor.h>

namespace emu {

// y = sum / rms(sum) * gamma of each row, with sum = x + added; without `added`, of x. rstd may be
// undefined.
void rms_norm_rows(const at::Tensor& x, const at::Tensor& added, const at::Tensor& gamma,
    const at::Tensor& sum, const at::Tensor& y, const at::Tensor& rstd, double epsilon);

// out = silu(the first half of a row) * the second half.
void swiglu_rows(const at::Tensor& x, const at::Tensor& out);

// Rotates the first values of each head, as many as a row of `cache` has: cosines and sines. Rows
// of x and out may have any stride; positions are int64.
void rope_rows(const at::Tensor& positions, const at::Tensor& x, const at::Tensor& cache,
    int64_t head_size, bool neox, const at::Tensor& out);

// sums[token] += weights[token][i] * rows[row_numbers[token][i]] for each of k choices; none for
// rows behind the last one. row_numbers: int32; weights: float32, or undefined for 1; sums:
// float32.
void add_weighted_rows(const at::Tensor& rows, const at::Tensor& row_numbers,
    const at::Tensor& weights, int64_t k, const at::Tensor& sums);

// Indices of the k largest float32 values in each row of any stride, lower indices first among
// ties.
at::Tensor top_of_rows(const at::Tensor& scores, int64_t k);

}  // namespace emu
