// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Quantization in groups or blocks to formats of eight and four bits. Semantics and limits:
// torch_npu's documentation of npu_dynamic_mx_quant, npu_dynamic_mx_quant_with_dual_axis,
// npu_grouped_dynamic_mx_quant and npu_dynamic_block_quant (torch_npu/_op_plugin_docs.py, BSD),
// op-plugin's page of npu_dynamic_block_quant; of npu_anti_mx_quant op-plugin's shape function.
#include "low_precision.h"
#include "quantized.h"

using namespace emu;
using formats::Format;
using formats::ScaleRule;

namespace {

struct Mx {
  formats::Rounding rounding;
  int64_t block;
  ScaleRule scale_rule;
  double most, least;  // dst_type_max and max_low_bound

  // The codes of shared exponents, [..., groups], of values [..., n] in float64, which become
  // quotients by them.
  Tensor divide(const Tensor& values, const Format& format) const {
    const int64_t n = values.size(-1), groups = (n + block - 1) / block,
                  rows = n ? values.numel() / n : 0;
    auto sizes = values.sizes().vec();
    sizes.back() = groups;
    const auto codes = at::empty(sizes, at::kByte);
    auto* value = values.mutable_data_ptr<double>();
    auto* code = codes.mutable_data_ptr<uint8_t>();
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t first = 0; first < n; first += block) {
        double* const group = value + row * n + first;
        const int64_t size = std::min(block, n - first);
        double largest = 0;
        for (int64_t i = 0; i < size; ++i) {
          const double magnitude = std::fabs(group[i]);
          if (std::isnan(magnitude) || magnitude > largest) largest = magnitude;  // NaN stays
        }
        if (least > 0 && largest < least) largest = least;
        *code = formats::scale_code(largest, format, scale_rule, most);
        const int exponent = *code++ - 127;
        for (int64_t i = 0; i < size; ++i) group[i] = std::ldexp(group[i], -exponent);
      }
    return codes;
  }

  // Quantizes along a dimension. Two successive groups are a pair in the last dimension of
  // `scale`, an odd number of groups has a zero behind it.
  void run(const Tensor& x, int64_t axis, const Tensor& out, const Tensor& scale) const {
    if (x.numel() == 0) return;
    const auto& format = Format::of(*format_of(out.scalar_type()));
    const auto values = x.to(at::kDouble).movedim(axis, -1).clone(at::MemoryFormat::Contiguous);
    auto codes = divide(values, format);
    encode(values.movedim(-1, axis), out, rounding, true);
    const int64_t groups = codes.size(-1);
    if (groups % 2) codes = at::constant_pad_nd(codes, {0, 1});
    const auto pairs = codes.unflatten(-1, {(groups + 1) / 2, 2});  // [..., groups / 2, 2]
    scale.view(at::kByte).copy_(pairs.movedim(-2, at::maybe_wrap_dim(axis, x.dim())));
  }
};

Mx rules_of(const Text& rounding, int64_t block, int64_t rule, double most, double least) {
  return {rounding_of(rounding), block, static_cast<ScaleRule>(rule), most, least};
}

// Of the formats with four bits.
void check_pairs(const Tensor& x, const Tensor& out) {
  if (!is_four_bits(out.scalar_type())) return;
  rule("dynamic_mx_quant.pairs", x.size(-1) % 2 == 0, "the last dimension of input is ", x.size(-1),
      "; it must be even for ", out.scalar_type());
}

void check_scales(const Tensor& x, int64_t axis, int64_t block, const Tensor& scale) {
  auto sizes = x.sizes().vec();
  auto& groups = sizes[at::maybe_wrap_dim(axis, x.dim())];
  groups = ((groups + block - 1) / block + 1) / 2;
  sizes.push_back(2);
  shape("mxscale", scale, sizes);
}

void check_numbers(const Tensor& x, int64_t axis, int64_t block, int64_t alg, double most,
    double least, const Tensor& out) {
  rule("dynamic_mx_quant.block-size", [&] {
    within("block_size", block, int64_t{32}, int64_t{1024});
    multiple("block_size", block, 32);
    require(block == 32 || (alg != 2 && x.scalar_type() != at::kFloat), "block_size is ", block,
        "; 32 is allowed for float32 and scale_alg 2");
  });
  rule("dynamic_mx_quant.float32-axis", x.scalar_type() != at::kFloat || x.size(axis) >= 32,
      "dimension ", axis, " of input is ", x.size(axis), "; of float32 at least 32 is allowed");
  rule("dynamic_mx_quant.dst-type-max", [&] {
    if (most == 0) return;
    within("dst_type_max", most, 6.0, 12.0);
    require(out.scalar_type() == at::kFloat4_e2m1fn_x2 && block == 32, "dst_type_max is ", most,
        "; other values than 0 are for float4_e2m1fn_x2 and block_size 32");
  });
  rule("dynamic_mx_quant.max-low-bound", least == 0 || (least > 0 && alg == 1), "max_low_bound is ",
      least, "; allowed: 0, and with scale_alg 1 positive numbers");
}

}  // namespace

CHECKED(aclnnDynamicMxQuantV3,
    (Tensor x, int64_t axis, Text round_mode, int32_t, int64_t block_size, int64_t scale_alg,
        double dst_type_max, double max_low_bound, Tensor out, Tensor scale),
    {
      rule("dynamic_mx_quant.axis", [&] { within("axis", axis, -x.dim(), x.dim() - 1); });
      check_numbers(x, axis, block_size, scale_alg, dst_type_max, max_low_bound, out);
      check_pairs(x, out);
      check_scales(x, axis, block_size, scale);
      const auto mx = rules_of(round_mode, block_size, scale_alg, dst_type_max, max_low_bound);
      COMPUTE { mx.run(x, axis, out, scale); };
    })
CHECKED(aclnnDynamicMxQuantV2,
    (Tensor x, int64_t axis, Text round_mode, int32_t type, int64_t block_size, int64_t scale_alg,
        double dst_type_max, Tensor out, Tensor scale),
    {
      return body_aclnnDynamicMxQuantV3(
          x, axis, round_mode, type, block_size, scale_alg, dst_type_max, 0, out, scale);
    })
CHECKED(aclnnDynamicMxQuant,
    (Tensor x, int64_t axis, Text round_mode, int32_t type, int64_t block_size, int64_t scale_alg,
        Tensor out, Tensor scale),
    {
      return body_aclnnDynamicMxQuantV3(
          x, axis, round_mode, type, block_size, scale_alg, 0, 0, out, scale);
    })

// Along the last dimension, and along the one before it.
CHECKED(aclnnDynamicMxQuantWithDualAxisV2,
    (Tensor x, Text round_mode, int32_t, int64_t scale_alg, double dst_type_max, Tensor out,
        Tensor scale, Tensor other_out, Tensor other_scale),
    {
      rank("input", x, 2, 7);
      check_numbers(x, -1, kGroup, scale_alg, dst_type_max, 0, out);
      check_pairs(x, out);
      check_scales(x, -1, kGroup, scale);
      check_scales(x, -2, kGroup, other_scale);
      const auto mx = rules_of(round_mode, kGroup, scale_alg, dst_type_max, 0);
      COMPUTE {
        mx.run(x, -1, out, scale);
        mx.run(x, -2, other_out, other_scale);
      };
    })
CHECKED(aclnnDynamicMxQuantWithDualAxis,
    (Tensor x, Text round_mode, int32_t type, int64_t scale_alg, Tensor out, Tensor scale,
        Tensor other_out, Tensor other_scale),
    {
      return body_aclnnDynamicMxQuantWithDualAxisV2(
          x, round_mode, type, scale_alg, 0, out, scale, other_out, other_scale);
    })

// Rows [group_index[i - 1], group_index[i]) of x, along the first dimension. The scales of a group
// begin at row group_index[i - 1] / 64 + i.
CHECKED(aclnnGroupedDynamicMxQuantV2,
    (Tensor x, Tensor group_index, Text round_mode, int32_t, int64_t block_size, int64_t scale_alg,
        double dst_type_max, Tensor out, Tensor scale),
    {
      rule("grouped_mx_quant.block-size", block_size == kGroup, "blocksize is ", block_size,
          "; 32 is allowed");
      check_pairs(x, out);
      shape("mxscale", scale, {x.size(0) / (2 * kGroup) + group_index.numel(), x.size(1), 2});
      const auto mx = rules_of(round_mode, block_size, scale_alg, dst_type_max, 0);
      COMPUTE {
        scale.view(at::kByte).zero_();
        const auto groups = emu::rows_of(group_index, 0, x.size(0));
        require(!groups.empty() && groups.back().last == x.size(0), "group_index ends at row ",
            groups.empty() ? 0 : groups.back().last, "; it must be ", x.size(0));
        for (const auto& [group, first, last] : groups) {
          if (last == first) continue;
          const int64_t rows = last - first, pairs = ((rows + kGroup - 1) / kGroup + 1) / 2;
          mx.run(x.narrow(0, first, rows), 0, out.narrow(0, first, rows),
              scale.narrow(0, first / (2 * kGroup) + group, pairs));
        }
      };
    })
CHECKED(aclnnGroupedDynamicMxQuant,
    (Tensor x, Tensor group_index, Text round_mode, int32_t type, int64_t block_size, Tensor out,
        Tensor scale),
    {
      return body_aclnnGroupedDynamicMxQuantV2(
          x, group_index, round_mode, type, block_size, 0, 0, out, scale);
    })

// The values of codes and their shared exponents.
CHECKED(aclnnAntiMxQuant, (Tensor x, Tensor scale, int64_t axis, int32_t, Tensor out), {
  within("axis", axis, -x.dim(), x.dim() - 1);
  rule("anti_mx_quant.formats", is_low_precision(x), "x is ", x.scalar_type(),
      "; float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2 and float4_e1m2fn_x2 are allowed");
  check_scales(out, axis, kGroup, scale);
  COMPUTE {
    const auto values = decoded(x).movedim(axis, -1);
    const auto codes = scale.movedim(at::maybe_wrap_dim(axis, x.dim()), -2);
    const auto factors = factors_of_groups(codes, values.size(-1), true);
    const auto each = factors.repeat_interleave(kGroup, -1).narrow(-1, 0, values.size(-1));
    out.copy_((values * each).movedim(-1, axis));
  };
})

namespace {

// Each block's largest magnitude [..., ceil(rows / r), ceil(columns / c)] of x, padded with zeros.
Tensor of_blocks(const Tensor& magnitudes, int64_t r, int64_t c) {
  const int64_t rows = magnitudes.size(-2), columns = magnitudes.size(-1);
  const auto up = [](int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; };
  return at::constant_pad_nd(magnitudes, {0, up(columns, c) - columns, 0, up(rows, r) - rows})
      .unflatten(-1, {-1, c})
      .unflatten(-3, {-1, r})
      .amax({-3, -1});
}

}  // namespace

// The scale is what a value is multiplied by after the matmul: the block's largest magnitude
// divided by the largest value of the dtype, at least min_scale.
CHECKED(aclnnDynamicBlockQuantV2,
    (Tensor x, double min_scale, Text round_mode, int32_t, int64_t row_block, int64_t column_block,
        double dst_type_max, Tensor out, Tensor scale),
    {
      const bool integers = out.scalar_type() == at::kChar;
      const auto rounding =
          out.scalar_type() == at::kBits8 ? formats::Rounding::round : rounding_of(round_mode);
      rule("dynamic_block_quant.blocks", row_block > 0 && column_block > 0, "a block is ",
          row_block, " x ", column_block);
      rule("dynamic_block_quant.min-scale", min_scale >= 0, "min_scale is ", min_scale,
          "; allowed: 0 and above");
      require_emulated(dst_type_max == 0, "dst_type_max ", dst_type_max, " is not emulated");
      COMPUTE {
        if (x.numel() == 0) return;
        const auto values = x.to(at::kFloat);
        const double top = integers ? 127 : Format::of(*format_of(out.scalar_type())).largest();
        const auto step =
            (of_blocks(values.abs(), row_block, column_block) / top).clamp_min(min_scale);
        scale.copy_(step);
        const auto each = step.repeat_interleave(row_block, -2)
                              .narrow(-2, 0, x.size(-2))
                              .repeat_interleave(column_block, -1)
                              .narrow(-1, 0, x.size(-1));
        const auto quotient = at::where(each > 0, values / each, at::zeros_like(values));
        if (integers) store_rounded(quotient, out, false);
        else encode(quotient, out, rounding, true);
      };
    })
CHECKED(aclnnDynamicBlockQuant,
    (Tensor x, double min_scale, Text round_mode, int32_t type, int64_t row_block,
        int64_t column_block, Tensor out, Tensor scale),
    {
      return body_aclnnDynamicBlockQuantV2(
          x, min_scale, round_mode, type, row_block, column_block, 0, out, scale);
    })
