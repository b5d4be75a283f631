// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Tensors in the formats of formats.h. HiF8 has the ScalarType Bits8, e1m2 Bits4x2 (tensor.cpp).
// Two values of four bits are a byte, the first in its lower half, along the contiguous dimension.
#pragma once
#include "formats.h"
#include "operator/op.h"

namespace emu {

constexpr int64_t kGroup = 32;  // values that share an exponent in MX formats

// The format of a dtype; empty for other dtypes, as of integers.
Opt<formats::Encoding> format_of(at::ScalarType dtype);
// Whether values are in e4m3, e5m2, HiF8, e2m1 or e1m2.
inline bool is_low_precision(const Tensor& tensor) {
  return tensor.defined() && format_of(tensor.scalar_type()) &&
         tensor.scalar_type() != at::kFloat8_e8m0fnu;
}
bool is_four_bits(at::ScalarType dtype);
// Whether a matrix is a transposed view, whose rows are contiguous.
bool is_column_major(const Tensor& matrix);
// Number of values in the last, or last but one, dimension.
int64_t columns_of(const Tensor& matrix);
int64_t rows_of_matrix(const Tensor& matrix);

// Values in float32: of four bits twice as many as bytes, in the contiguous dimension.
Tensor decoded(const Tensor& codes);
// Writes values, in float32 or float64, as codes. Packs four bits in pairs along the last
// dimension.
void encode(const Tensor& values, const Tensor& out, formats::Rounding rounding, bool saturate);
// Throws for other names than rint, floor and round.
formats::Rounding rounding_of(const Text& name);

// Quantizes by the largest magnitude along dimensions, or of all values without dimensions:
// int8, or a format of formats.h. It becomes `most`, or the largest value of the dtype if that
// is 0.
void quantize_along(
    const Tensor& values, const Ints& dims, double most, const Tensor& out, const Tensor& scale);

// Factors [..., groups, n] in float32 of the values [..., k, n] from their shared exponents, of
// which two groups are a pair: [..., ceil(k / 64), n, 2]. With `along_rows` of values [..., m, k]:
// [..., m, ceil(k / 64), 2].
Tensor factors_of_groups(const Tensor& pairs, int64_t k, bool along_rows);

}  // namespace emu
