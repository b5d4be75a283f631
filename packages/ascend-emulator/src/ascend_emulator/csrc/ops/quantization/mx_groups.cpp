// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "mx_groups.h"

#include "quantized.h"

namespace emu {

Tensor MxGroups::divide(const Tensor& values, const formats::Format& format) const {
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

void MxGroups::run(const Tensor& x, int64_t axis, const Tensor& out, const Tensor& scale) const {
  if (x.numel() == 0) return;
  const auto& format = formats::Format::of(*format_of(out.scalar_type()));
  const auto values = x.to(at::kDouble).movedim(axis, -1).clone(at::MemoryFormat::Contiguous);
  auto codes = divide(values, format);
  encode(values.movedim(-1, axis), out, rounding, true);
  const int64_t groups = codes.size(-1);
  if (groups % 2) codes = at::constant_pad_nd(codes, {0, 1});
  const auto pairs = codes.unflatten(-1, {(groups + 1) / 2, 2});  // [..., groups / 2, 2]
  scale.view(at::kByte).copy_(pairs.movedim(-2, at::maybe_wrap_dim(axis, x.dim())));
}

void MxGroups::run_in_groups(
    const Tensor& x, const Tensor& ends, const Tensor& out, const Tensor& scale) const {
  scale.view(at::kByte).zero_();
  const auto groups = rows_of(ends, 0, x.size(0));
  require(!groups.empty() && groups.back().last == x.size(0), "group_index ends at row ",
      groups.empty() ? 0 : groups.back().last, "; it must be ", x.size(0));
  for (const auto& [group, first, last] : groups) {
    if (last == first) continue;
    const int64_t rows = last - first, pairs = ((rows + kGroup - 1) / kGroup + 1) / 2;
    run(x.narrow(0, first, rows), 0, out.narrow(0, first, rows),
        scale.narrow(0, first / (2 * kGroup) + group, pairs));
  }
}

MxGroups mx_groups(const Text& rounding, int64_t block, int64_t rule, double most, double least) {
  return {rounding_of(rounding), block, static_cast<formats::ScaleRule>(rule), most, least};
}

void check_mx_scales(at::IntArrayRef values, int64_t axis, int64_t block, const Tensor& scale) {
  auto sizes = values.vec();
  auto& groups = sizes[at::maybe_wrap_dim(axis, static_cast<int64_t>(values.size()))];
  groups = ((groups + block - 1) / block + 1) / 2;
  sizes.push_back(2);
  shape("mxscale", scale, sizes);
}

}  // namespace emu
