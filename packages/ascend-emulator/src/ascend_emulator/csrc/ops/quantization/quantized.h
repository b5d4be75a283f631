// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Common part of quantized operators: rounding, int4 packing, groups of rows. Rounding is to the
// nearest, ties to even (torch.round, which torch_npu's documentation and op-plugin's tests use as
// "round").
#pragma once
#include "operator/op.h"

namespace emu {

constexpr int64_t kFourBitsInWord = 8;  // int4 values in an int32
constexpr int32_t kAclInt4 = 29;        // aclDataType ACL_INT4

// int32 [..., n] -> int8 [..., 8 n]. The lowest four bits come first (op-plugin's
// ConvertWeightToINT4PackKernelNpuOpApi.cpp).
Tensor unpack_int4(const Tensor& words);
// Values in [-8, 7], [..., 8 n] -> int32 [..., n].
Tensor pack_int4(const Tensor& values);
// Unpacks a weight matrix, possibly a transposed view: the packed dimension is the contiguous one.
Tensor unpack_matrix(const Tensor& words);

// Rounds to out's dtype: int8, uint8, int32; or int4, packed in int32 or int8.
void store_rounded(const Tensor& values, const Tensor& out, bool four_bits);

// The dtype's largest value for symmetric quantization: 127 or 7.
inline double largest(bool four_bits) { return four_bits ? 7 : 127; }

// [first, last) of each group among `rows`. List types (npu_grouped_matmul's group_list_type): 0
// cumulative ends, 1 counts, 2 pairs of group and count.
struct Rows {
  int64_t group, first, last;
};
std::vector<Rows> rows_of(const Tensor& list, int64_t kind, int64_t rows);

// Scales rows of x by their group's row of scales.
Tensor scaled_by_group(const Tensor& x, const Tensor& scales, const std::vector<Rows>& groups);

// Symmetric quantization of rows: values / (row's largest magnitude / 127). The scale is written to
// `scale`.
void quantize_rows(const Tensor& values, const Tensor& out, const Tensor& scale, bool four_bits);

// a @ b of int8 matrices, exact in int32; batches broadcast.
Tensor integer_product(const Tensor& a, const Tensor& b);

// Scale in float32, also from npu_trans_quant_param's 64-bit format, whose lower half is a float.
Tensor scale_values(const Tensor& scale);

// Weights [k, n] in float32: (w + offset) * scale; per tensor, per column, or per group of rows.
Tensor dequantized(const Tensor& weight, const Tensor& scale, const Opt<Tensor>& offset);

}  // namespace emu
