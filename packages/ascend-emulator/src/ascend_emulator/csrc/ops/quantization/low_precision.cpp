// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "low_precision.h"

#include "quantized.h"

namespace emu {

using formats::Encoding;
using formats::Format;
using formats::Rounding;

Opt<Encoding> format_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat8_e4m3fn: return Encoding::e4m3;
    case at::kFloat8_e5m2: return Encoding::e5m2;
    case at::kFloat8_e8m0fnu: return Encoding::e8m0;
    case at::kFloat4_e2m1fn_x2: return Encoding::e2m1;
    case at::kBits4x2: return Encoding::e1m2;
    case at::kBits8: return Encoding::hif8;
    default: return std::nullopt;
  }
}

bool is_four_bits(at::ScalarType dtype) {
  return dtype == at::kFloat4_e2m1fn_x2 || dtype == at::kBits4x2;
}

bool is_column_major(const Tensor& matrix) {
  return matrix.dim() > 1 && matrix.stride(-1) != 1 && matrix.stride(-2) == 1;
}

int64_t columns_of(const Tensor& matrix) {
  const bool packed = is_four_bits(matrix.scalar_type()) && !is_column_major(matrix);
  return matrix.size(-1) * (packed ? 2 : 1);
}
int64_t rows_of_matrix(const Tensor& matrix) {
  const bool packed = is_four_bits(matrix.scalar_type()) && is_column_major(matrix);
  return matrix.size(-2) * (packed ? 2 : 1);
}

Tensor decoded(const Tensor& codes) {
  const auto kind = format_of(codes.scalar_type());
  require(kind.has_value(), "values of ", codes.scalar_type(), " have no format of eight bits");
  const bool column_major = is_column_major(codes), four = is_four_bits(codes.scalar_type());
  const auto bytes = (column_major ? codes.transpose(-1, -2) : codes).view(at::kByte).contiguous();
  auto sizes = bytes.sizes().vec();
  if (four) sizes.back() *= 2;
  const auto values = at::empty(sizes, at::kFloat);
  const auto& format = Format::of(*kind);
  const auto* from = bytes.const_data_ptr<uint8_t>();
  auto* to = values.mutable_data_ptr<float>();
  for (int64_t i = 0; i < bytes.numel(); ++i) {
    if (!four) {
      to[i] = format.value(from[i]);
      continue;
    }
    to[2 * i] = format.value(from[i] & 15);
    to[2 * i + 1] = format.value(from[i] >> 4);
  }
  return column_major ? values.transpose(-1, -2) : values;
}

void encode(const Tensor& values, const Tensor& out, Rounding rounding, bool saturate) {
  const auto kind = format_of(out.scalar_type());
  require(kind.has_value(), "an output of ", out.scalar_type(), " has no format of eight bits");
  const auto& format = Format::of(*kind);
  const auto wide = values.to(at::kDouble).contiguous();
  const auto codes = at::empty(out.sizes(), at::kByte);
  const auto* from = wide.const_data_ptr<double>();
  auto* to = codes.mutable_data_ptr<uint8_t>();
  const bool four = is_four_bits(out.scalar_type());
  for (int64_t i = 0; i < codes.numel(); ++i) {
    if (!four) {
      to[i] = format.code(from[i], rounding, saturate);
      continue;
    }
    const int low = format.code(from[2 * i], rounding, true),
              high = format.code(from[2 * i + 1], rounding, true);
    to[i] = static_cast<uint8_t>(low | high << 4);
  }
  out.view(at::kByte).copy_(codes);
}

Rounding rounding_of(const Text& name) {
  if (name == "rint") return Rounding::rint;
  if (name == "floor") return Rounding::floor;
  if (name == "round") return Rounding::round;
  raise(kOpParam, {"round_mode is ", name, "; rint, floor and round are emulated"}, /*own=*/true);
}

void quantize_along(
    const Tensor& values, const Ints& dims, double most, const Tensor& out, const Tensor& scale) {
  const auto kind = format_of(out.scalar_type());
  const double top = most > 0 ? most : kind ? Format::of(*kind).largest() : largest(false);
  const auto magnitudes = values.abs();
  const auto found = dims.empty() ? magnitudes.amax() : magnitudes.amax(dims, true);
  const auto step = found / top;
  scale.copy_(step.reshape(scale.sizes()));
  const auto quotient =
      at::where(step > 0, values / step, at::zeros_like(values)).reshape(out.sizes());
  if (kind) encode(quotient, out, Rounding::rint, true);
  else store_rounded(quotient, out, false);
}

Tensor factors_of_groups(const Tensor& pairs, int64_t k, bool along_rows) {
  auto factors = decoded(pairs.contiguous());
  // [..., m, ceil(k / 64), 2] is in the order of groups; the pairs of [..., ceil(k / 64), n, 2]
  // are brought beside their dimension.
  if (!along_rows) factors = factors.movedim(-1, -2);
  const int64_t dim = along_rows ? -1 : -2, first = along_rows ? -2 : -3;
  return factors.flatten(first, dim).narrow(dim, 0, (k + kGroup - 1) / kGroup);
}

}  // namespace emu
