// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Quantization in groups or blocks to formats of eight and four bits. Semantics and limits:
// torch_npu's documentation of npu_dynamic_mx_quant, npu_dynamic_mx_quant_with_dual_axis,
// npu_grouped_dynamic_mx_quant and npu_dynamic_block_quant (torch_npu/_op_plugin_docs.py, BSD),
// op-plugin's pages of npu_dynamic_block_quant and npu_grouped_dynamic_block_quant; of
// npu_anti_mx_quant op-plugin's shape function.
#include "mx_groups.h"
#include "quantized.h"

using namespace emu;
using formats::Format;
using formats::ScaleRule;

namespace {

// Of the formats with four bits.
void check_pairs(const Tensor& x, const Tensor& out) {
  if (!is_four_bits(out.scalar_type())) return;
  rule("dynamic_mx_quant.pairs", x.size(-1) % 2 == 0, "the last dimension of input is ", x.size(-1),
      "; it must be even for ", out.scalar_type());
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
      check_mx_scales(x.sizes(), axis, block_size, scale);
      const auto mx = mx_groups(round_mode, block_size, scale_alg, dst_type_max, max_low_bound);
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
      check_mx_scales(x.sizes(), -1, kGroup, scale);
      check_mx_scales(x.sizes(), -2, kGroup, other_scale);
      const auto mx = mx_groups(round_mode, kGroup, scale_alg, dst_type_max, 0);
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
      const auto mx = mx_groups(round_mode, block_size, scale_alg, dst_type_max, 0);
      COMPUTE { mx.run_in_groups(x, group_index, out, scale); };
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
  check_mx_scales(out.sizes(), axis, kGroup, scale);
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

// Each value divided by its block's step; zero for a step of zero.
Tensor quotient_by_blocks(const Tensor& values, const Tensor& step, int64_t r, int64_t c) {
  const auto each = step.repeat_interleave(r, -2)
                        .narrow(-2, 0, values.size(-2))
                        .repeat_interleave(c, -1)
                        .narrow(-1, 0, values.size(-1));
  return at::where(each > 0, values / each, at::zeros_like(values));
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
        const auto quotient = quotient_by_blocks(values, step, row_block, column_block);
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

// Rows [group_list[i - 1], group_list[i]) of x [..., rows, columns]. The scales of a group begin at
// row group_list[i - 1] / row_block + i.
CHECKED(aclnnGroupedDynamicBlockQuantV2,
    (Tensor x, Tensor group_list, double min_scale, Text round_mode, int32_t, int64_t row_block,
        int64_t column_block, int64_t group_list_type, double dst_type_max, Tensor out,
        Tensor scale),
    {
      const auto kind = *format_of(out.scalar_type());
      const bool hif8 = kind == formats::Encoding::hif8;
      require_emulated(
          !hif8 || round_mode == "round", "round_mode ", round_mode, " of HiF8 is not emulated");
      // Its page divides by the scale that the page of npu_dynamic_block_quant multiplies by.
      require_emulated(min_scale == 0, "min_scale ", min_scale, " is not emulated");
      rule("grouped_block_quant.dst-type-max",
          dst_type_max == 0 || (hif8 && dst_type_max > 0 && dst_type_max <= 32768),
          "dst_type_max is ", dst_type_max, "; allowed: 0, and of HiF8 up to 32768");
      COMPUTE {
        scale.zero_();
        if (x.numel() == 0) return;
        const auto groups = emu::rows_of(group_list, 0, x.size(-2));
        require(!groups.empty() && groups.back().last == x.size(-2), "group_list ends at row ",
            groups.empty() ? 0 : groups.back().last, "; it must be ", x.size(-2));
        const double top = dst_type_max > 0 ? dst_type_max : Format::of(kind).largest();
        for (const auto& [group, first, last] : groups) {
          if (last == first) continue;
          const int64_t rows = last - first;
          const auto values = x.narrow(-2, first, rows).to(at::kFloat);
          const auto step = of_blocks(values.abs(), row_block, column_block) / top;
          scale.narrow(-2, first / row_block + group, step.size(-2)).copy_(step);
          encode(quotient_by_blocks(values, step, row_block, column_block),
              out.narrow(-2, first, rows),
              hif8 ? formats::Rounding::round : rounding_of(round_mode), true);
        }
      };
    })
CHECKED(aclnnGroupedDynamicBlockQuant,
    (Tensor x, Tensor group_list, double min_scale, Text round_mode, int32_t type,
        int64_t row_block, int64_t column_block, int64_t group_list_type, Tensor out, Tensor scale),
    {
      return body_aclnnGroupedDynamicBlockQuantV2(x, group_list, min_scale, round_mode, type,
          row_block, column_block, group_list_type, 0, out, scale);
    })
