// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Quantization and dequantization. Semantics and limits: torch_npu's documentation of npu_quantize,
// npu_dynamic_quant(_asymmetric), npu_anti_quant, npu_trans_quant_param, npu_quant_scatter and
// npu_kronecker_quant (torch_npu/_op_plugin_docs.py, BSD); of npu_group_quant op-plugin's shape
// function and test; of aclnnFlatQuant Huawei's API reference.
#include "ops/upcast.h"
#include "low_precision.h"
#include "quantized.h"

using namespace emu;

namespace {

// Broadcasts a scalar, or one value per element of the axis.
Tensor broadcast_along(const Tensor& parameter, int64_t axis, const Tensor& x) {
  const auto fp32 = parameter.to(at::kFloat);
  if (parameter.numel() == 1) return fp32.reshape({});
  if (parameter.dim() != 1) return fp32;
  std::vector<int64_t> shape(x.dim(), 1);
  shape[at::maybe_wrap_dim(axis, x.dim())] = parameter.numel();
  return fp32.view(shape);
}

void check_axis(const char* name, const Tensor& parameter, int64_t axis, const Tensor& x) {
  if (parameter.numel() == 1) return;
  const int64_t at_axis = at::maybe_wrap_dim(axis, x.dim());
  if (parameter.dim() == 1) {
    require(parameter.numel() == x.size(at_axis), name, " has ", parameter.numel(),
        " elements; allowed: 1, or ", x.size(at_axis), ", dimension ", axis, " of the input ",
        x.sizes());
    return;
  }
  require(parameter.dim() == x.dim(), name, " has ", parameter.dim(),
      " dimensions; allowed: 1, or ", x.dim(), " as the input");
  for (int64_t i = 0; i < x.dim(); ++i)
    require(parameter.size(i) == 1 || (i == at_axis && parameter.size(i) == x.size(i)), name,
        " has shape ", parameter.sizes(), "; only dimension ", axis,
        " may differ from 1, and is then that of the input ", x.sizes());
}

void end_at(const std::vector<Rows>& groups, int64_t rows) {
  const int64_t last = groups.empty() ? 0 : groups.back().last;
  require(last == rows, "group_index ends at row ", last, "; it must be ", rows);
}

}  // namespace

CHECKED(aclnnQuantize,
    (Tensor x, Tensor scales, Opt<Tensor> zero_points, int32_t, int64_t axis, Tensor out), {
      rule("quantize.axis-size", [&] {
        check_axis("scales", scales, axis, x);
        if (zero_points) check_axis("zero_points", *zero_points, axis, x);
      });
      COMPUTE {
        auto values = x.to(at::kFloat) / broadcast_along(scales, axis, x);
        if (zero_points) values = at::round(values) + broadcast_along(*zero_points, axis, x);
        store_rounded(values, out, false);
      };
    })

CHECKED(aclnnAscendQuantV3,
    (Tensor x, Tensor scale, Opt<Tensor> offset, bool square, Text mode, int32_t, int64_t axis,
        Tensor out),
    {
      rule("ascend_quant.axis-size", [&] { check_axis("scales", scale, axis, x); });
      const bool four_bits = out.scalar_type() == at::kInt;
      COMPUTE {
        auto factor = broadcast_along(scale, axis, x);
        if (square) factor = factor * factor;
        auto values = x.to(at::kFloat) * factor;
        if (offset) values = values + broadcast_along(*offset, axis, x);
        store_rounded(values, out, four_bits);
      };
    })
CHECKED(aclnnAscendQuant,
    (Tensor x, Tensor scale, Opt<Tensor> offset, bool square, Text mode, int32_t, Tensor out),
    { return body_aclnnAscendQuantV3(x, scale, offset, square, mode, 0, -1, out); })

// Symmetric without offset_out, asymmetric with it.
CHECKED(aclnnDynamicQuantV2,
    (Tensor x, Opt<Tensor> smooth, Opt<Tensor> group_index, int32_t, Tensor out, Tensor scale,
        Opt<Tensor> offset_out),
    {
      const bool four_bits = out.scalar_type() == at::kInt;
      if (smooth)
        rule("dynamic_quant.smooth-size", smooth->size(-1) == x.size(-1),
            "the last dimension of smooth_scales is ", smooth->size(-1),
            " and the last dimension of x is ", x.size(-1), "; they must be the same");
      COMPUTE {
        auto values = x.to(at::kFloat).reshape({-1, x.size(-1)});
        if (values.numel() == 0) return;
        if (group_index) {
          const auto groups = rows_of(*group_index, 0, values.size(0));
          end_at(groups, values.size(0));
          values = scaled_by_group(values, *smooth, groups);
        } else if (smooth) {
          values = values * smooth->to(at::kFloat);
        }
        if (is_low_precision(out)) return quantize_along(values, {-1}, 0, out, scale);
        const auto rounded = out.view({values.size(0), -1});
        if (!offset_out) return quantize_rows(values, rounded, scale, four_bits);
        const auto most = values.amax(-1, true), least = values.amin(-1, true);
        const double top = largest(four_bits);
        const auto step = (most - least) / (2 * top + 1), offset = top - most / step;
        scale.copy_(step.view(scale.sizes()));
        offset_out->copy_(offset.view(scale.sizes()));
        // Zeros for a row of one value, whose step is 0.
        store_rounded((values / step + offset).nan_to_num(0.0), rounded, four_bits);
      };
    })
// One scale of each row, of each column of a matrix, or of all values.
CHECKED(aclnnDynamicQuantV4,
    (Tensor x, Opt<Tensor> smooth, Opt<Tensor> group_index, int32_t type, bool symmetric, Text mode,
        float dst_type_max, Tensor out, Tensor scale, Opt<Tensor> offset_out),
    {
      if (mode == "pertoken" && dst_type_max == 0)
        return body_aclnnDynamicQuantV2(x, smooth, group_index, type, out, scale, offset_out);
      require_emulated(symmetric && !group_index && out.scalar_type() != at::kInt, "quant_mode ",
          mode, " with an offset, group_index or int4 is not emulated");
      const auto dims = mode == "pertoken" ? Ints{-1} : mode == "perchannel" ? Ints{-2} : Ints{};
      // Along columns, the factors are those of rows (op-plugin's test_npu_dynamic_quant.py).
      const bool of_rows = mode == "perchannel";
      if (smooth)
        rule("dynamic_quant.smooth-size-950", smooth->numel() == x.size(of_rows ? -2 : -1),
            "smooth_scales has ", smooth->numel(), " elements; with quant_mode ", mode, " ",
            x.size(of_rows ? -2 : -1), " are allowed");
      COMPUTE {
        if (x.numel() == 0) return;
        auto values = x.to(at::kFloat);
        if (smooth) {
          const auto factors = smooth->to(at::kFloat);
          values = values * (of_rows ? factors.unsqueeze(-1) : factors);
        }
        quantize_along(values, dims, dst_type_max, out, scale);
      };
    })
CHECKED(aclnnDynamicQuantV3,
    (Tensor x, Opt<Tensor> smooth, Opt<Tensor> group_index, int32_t type, bool symmetric, Text mode,
        Tensor out, Tensor scale, Opt<Tensor> offset_out),
    {
      return body_aclnnDynamicQuantV4(
          x, smooth, group_index, type, symmetric, mode, 0, out, scale, offset_out);
    })
CHECKED(aclnnDynamicQuant, (Tensor x, Opt<Tensor> smooth, Tensor out, Tensor scale),
    { return body_aclnnDynamicQuantV2(x, smooth, {}, 0, out, scale, {}); })

CHECKED(aclnnAscendAntiQuant,
    (Tensor x, Tensor scale, Opt<Tensor> offset, int32_t, bool square, Tensor out), {
      const bool four_bits = x.scalar_type() == at::kInt;
      const int64_t columns = x.size(-1) * (four_bits ? kFourBitsInWord : 1);
      rule("anti_quant.scale-size", scale.numel() == 1 || scale.numel() == columns, "scale has ",
          scale.numel(), " elements; allowed: 1 or ", columns);
      COMPUTE {
        auto factor = scale.to(at::kFloat);
        if (square) factor = factor * factor;
        auto values = (four_bits ? unpack_int4(x) : x).to(at::kFloat);
        if (offset) values = values + offset->to(at::kFloat);
        out.copy_(values * factor);
      };
    })

// 64-bit parameters of the cube unit's dequantization: the scale's upper 19 bits in the lower half,
// a flag at bit 46, the nine bits of the offset at bit 37 (op-plugin's
// test_npu_trans_quant_param.py; aclnnTransQuantParamV2 in Huawei's API reference).
CHECKED(
    aclnnTransQuantParamV3, (Tensor scale, Opt<Tensor> offset, int64_t round_mode, Tensor out), {
      rule("trans_quant_param.sizes",
          !offset || offset->numel() == 1 || scale.numel() == 1 || offset->numel() == scale.numel(),
          "offset has ", offset ? offset->numel() : 0, " elements and scale ", scale.numel());
      COMPUTE {
        auto bits = scale.contiguous().view(at::kInt).to(at::kLong).bitwise_and_(0xFFFFFFFFll);
        if (round_mode == 1) {  // to the nearest, ties to even
          const auto even = at::bitwise_and(at::bitwise_right_shift(bits, 13), 1);
          bits = bits + (even + 0xFFF);
        }
        bits = at::bitwise_or(at::bitwise_and(bits, 0xFFFFE000ll), 1ll << 46);
        if (offset)
          bits = at::bitwise_or(bits,
              at::bitwise_left_shift(
                  at::bitwise_and(at::round(*offset).clamp(-256, 255).to(at::kLong), 0x1FF), 37));
        out.copy_(bits.expand(out.sizes()));
      };
    })
CHECKED(aclnnTransQuantParamV2, (Tensor scale, Opt<Tensor> offset, Tensor out),
    { return body_aclnnTransQuantParamV3(scale, offset, 0, out); })

CHECKED(aclnnInplaceQuantScatter,
    (Tensor self, Tensor indices, Tensor updates, Tensor scales, Opt<Tensor> zero_points,
        int64_t axis, int64_t quant_axis, int64_t),
    {
      const int64_t place = at::maybe_wrap_dim(axis, self.dim());
      require(place != 0 && place != self.dim() - 1, "axis ", axis,
          " is the first or the last dimension of updates; neither is allowed");
      require(at::maybe_wrap_dim(quant_axis, self.dim()) == self.dim() - 1, "quant_axis is ",
          quant_axis, "; only the last dimension is allowed");
      require(updates.size(0) == indices.size(0) && updates.size(0) <= self.size(0), "updates has ",
          updates.size(0), " rows, indices ", indices.size(0), " and input ", self.size(0));
      for (int64_t i = 1; i < self.dim(); ++i)
        require(i == place ? updates.size(i) <= self.size(i) : updates.size(i) == self.size(i),
            "updates has shape ", updates.sizes(), " and input ", self.sizes());
      COMPUTE {
        auto values = updates.to(at::kFloat) / scales.to(at::kFloat).reshape({-1});
        if (zero_points) values = values + zero_points->to(at::kFloat).reshape({-1});
        const auto rounded = at::empty(updates.sizes(), at::kChar);
        store_rounded(values, rounded, false);
        const auto where = indices.to(at::kLong);
        for (int64_t i = 0; i < updates.size(0); ++i) {
          const int64_t batch = where.dim() == 1 ? i : where[i][0].item<int64_t>(),
                        start = where.dim() == 1 ? where[i].item<int64_t>()
                                                 : where[i][1].item<int64_t>();
          require(batch >= 0 && batch < self.size(0) && start >= 0 &&
                      start + updates.size(place) <= self.size(place),
              "index (", batch, ", ", start, ") is outside the input ", self.sizes());
          self[batch].narrow(place - 1, start, updates.size(place)).copy_(rounded[i]);
        }
      };
    })

CHECKED(aclnnFlatQuantV2,
    (Tensor x, Tensor left, Tensor right, double clip_ratio, double dst_type_max, Tensor out,
        Tensor scale),
    {
      rule("flat_quant.numbers", [&] {
        require(clip_ratio > 0 && clip_ratio <= 1, "clip_ratio is ", clip_ratio,
            "; allowed: above 0, up to 1");
        require(dst_type_max == 0, "dst_type_max is ", dst_type_max, "; int4 takes 0");
      });
      COMPUTE {
        const auto values =
            at::matmul(left.to(at::kFloat), at::matmul(x.to(at::kFloat), right.to(at::kFloat)));
        const auto step = values.abs().amax({1, 2}) / (7.0 / clip_ratio);
        scale.copy_(step);
        store_rounded(at::where(step.view({-1, 1, 1}) > 0, values / step.view({-1, 1, 1}),
                          at::zeros_like(values)),
            out, true);
      };
    })
CHECKED(aclnnFlatQuant,
    (Tensor x, Tensor left, Tensor right, double clip_ratio, Tensor out, Tensor scale),
    { return body_aclnnFlatQuantV2(x, left, right, clip_ratio, 0, out, scale); })

// Rows [group_index[i-1], group_index[i]) of x times scale[i], plus offset.
CHECKED(aclnnGroupQuant,
    (Tensor x, Tensor scale, Tensor group_index, Opt<Tensor> offset, int32_t, Tensor out), {
      const bool four_bits = out.scalar_type() == at::kInt;
      COMPUTE {
        const auto groups = rows_of(group_index, 0, x.size(0));
        if (!groups.empty()) end_at(groups, x.size(0));
        auto values = scaled_by_group(x.to(at::kFloat), scale, groups);
        if (offset) values = values + offset->to(at::kFloat);
        store_rounded(values, out, four_bits);
      };
    })

// torch.fake_quantize_per_…_affine: values that were rounded, and a mask of those within the range.
namespace {
void check_range(int64_t least, int64_t most) {
  require(least < most, "quant_min is ", least, " and quant_max ", most, "; it must be smaller");
}
}  // namespace
CHECKED(aclnnFakeQuantPerChannelAffineCachemask,
    (Tensor x, Tensor scale, Tensor zero_point, int64_t axis, int64_t least, int64_t most,
        Tensor out, Tensor mask),
    {
      check_range(least, most);
      within("axis", axis, int64_t{0}, x.dim() - 1);
      shape("scale", scale, {x.size(axis)});
      shape("zero_point", zero_point, {x.size(axis)});
      COMPUTE {
        copy_both(at::fake_quantize_per_channel_affine_cachemask(x.to(at::kFloat),
                      scale.to(at::kFloat), zero_point.to(at::kInt), axis, least, most),
            out, mask);
      };
    })
CHECKED(aclnnFakeQuantPerTensorAffineCachemask,
    (Tensor x, Tensor scale, Tensor zero_point, float enabled, int64_t least, int64_t most,
        Tensor out, Tensor mask),
    {
      check_range(least, most);
      COMPUTE {
        copy_both(at::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x.to(at::kFloat),
                      scale.to(at::kFloat), zero_point.to(at::kInt),
                      at::full({1}, enabled > 0 ? 1 : 0, at::kLong), least, most),
            out, mask);
      };
    })

namespace {

// The format of npu_quant_max's output, rounded as its round_mode says.
void store_quotient(const Tensor& values, const Tensor& out, const Text& mode) {
  require_emulated(mode != "hybrid", "round_mode hybrid is not emulated");
  encode(values, out, rounding_of(mode), true);
}

}  // namespace

// x * scale in another format, and the largest magnitude of x: torch_npu's documentation of
// npu_quant_max (torch_npu/_op_plugin_docs.py, BSD).
CHECKED(
    aclnnQuantMax, (Tensor x, Tensor scale, Text round_mode, int64_t, Tensor out, Tensor amax), {
      COMPUTE {
        if (x.numel() == 0) return void(amax.zero_());
        const auto values = x.to(at::kFloat);
        store_quotient(values * scale.to(at::kFloat).reshape({}), out, round_mode);
        amax.copy_(values.abs().amax().reshape({1}));
      };
    })
// The same for rows [group_list[i - 1], group_list[i]) of the first dimension.
CHECKED(aclnnGroupedQuantMax,
    (Tensor x, Tensor scale, Opt<Tensor> group_list, Text round_mode, int64_t, Tensor out,
        Tensor amax),
    {
      rule("quant_max.scale-size", group_list && scale.numel() == group_list->numel(), "scale has ",
          scale.numel(), " elements; allowed: one for each group of group_list");
      COMPUTE {
        amax.zero_();
        const auto groups = rows_of(*group_list, 0, x.size(0));
        end_at(groups, x.size(0));
        for (const auto& [group, first, last] : groups) {
          if (last == first) continue;
          const auto values = x.narrow(0, first, last - first).to(at::kFloat);
          store_quotient(values * scale[group], out.narrow(0, first, last - first), round_mode);
          amax[group].copy_(values.abs().amax());
        }
      };
    })

// The activation in float32, then quantization with given scales, or of rows: op-plugin's
// test_npu_gelu_quant.py.
CHECKED(aclnnGeluQuant,
    (Tensor x, Opt<Tensor> scale, Opt<Tensor> offset, Text approximate, Text mode, Text, int32_t,
        Tensor out, Opt<Tensor> out_scale),
    {
      const bool dynamic = mode == "dynamic";
      rule("gelu_quant.scale-needed", dynamic || scale, "input_scale is None; static needs it");
      COMPUTE {
        auto values = at::gelu(x.to(at::kFloat), approximate == "tanh" ? "tanh" : "none");
        if (scale) values = values * scale->to(at::kFloat);
        if (!dynamic && offset) values = values + offset->to(at::kFloat);
        if (dynamic) return quantize_along(values, {-1}, 0, out, *out_scale);
        if (is_low_precision(out)) encode(values, out, formats::Rounding::rint, true);
        else store_rounded(values, out, false);
      };
    })
