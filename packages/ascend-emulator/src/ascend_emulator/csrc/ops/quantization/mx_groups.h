// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Quantization in groups with a shared exponent, for mx_quant.cpp and for operators that quantize
// what they compute.
#pragma once
#include "low_precision.h"

namespace emu {

struct MxGroups {
  formats::Rounding rounding;
  int64_t block;  // values of a group
  formats::ScaleRule scale_rule;
  double most, least;  // dst_type_max and max_low_bound

  // Quantizes along a dimension. Two successive groups are a pair in the last dimension of
  // `scale`, an odd number of groups has a zero behind it.
  void run(const Tensor& x, int64_t axis, const Tensor& out, const Tensor& scale) const;
  // The same along the first dimension, in rows [ends[i - 1], ends[i]). The scales of such rows
  // begin at row ends[i - 1] / 64 + i.
  void run_in_groups(
      const Tensor& x, const Tensor& ends, const Tensor& out, const Tensor& scale) const;

 private:
  // The codes of shared exponents, [..., groups], of values [..., n] in float64, which become
  // quotients by them.
  Tensor divide(const Tensor& values, const formats::Format& format) const;
};

MxGroups mx_groups(const Text& rounding, int64_t block, int64_t rule, double most, double least);

// The scales of values in this shape, quantized along an axis.
void check_mx_scales(at::IntArrayRef values, int64_t axis, int64_t block, const Tensor& scale);

}  // namespace emu
