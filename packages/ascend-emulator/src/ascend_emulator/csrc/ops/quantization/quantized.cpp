// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "quantized.h"

#include "core/vector_unit.h"

namespace emu {

namespace {

// 1024 x 128 x 128 is 2^24, up to which float32 holds each integer: sums are exact in any order.
constexpr int64_t kExactColumns = 1024;

// ATen multiplies int8 matrices in a plain loop where oneDNN has no AVX-512 for them.
Tensor int8_product(const Tensor& a, const Tensor& b) {
  const auto unit = vector_unit();
  if (unit == VectorUnit::avx512 || unit == VectorUnit::avx512_bf16) return at::_int_mm(a, b);
  auto sums = at::zeros({a.size(0), b.size(1)}, a.options().dtype(at::kInt));
  for (int64_t k = 0; k < a.size(1); k += kExactColumns) {
    const int64_t size = std::min(kExactColumns, a.size(1) - k);
    sums += at::mm(a.narrow(1, k, size).to(at::kFloat), b.narrow(0, k, size).to(at::kFloat))
                .to(at::kInt);
  }
  return sums;
}

}  // namespace

Tensor unpack_int4(const Tensor& words) {
  const auto bytes = words.contiguous().view(at::kByte);  // little-endian, as NPUs are
  const auto low = at::bitwise_and(bytes, 15), high = at::bitwise_right_shift(bytes, 4);
  const auto nibbles = at::stack({low, high}, -1).flatten(-2).view(at::kChar);
  return nibbles - at::bitwise_and(nibbles, 8) * 2;
}

Tensor pack_int4(const Tensor& values) {
  const auto nibbles =
      at::bitwise_and(values.to(at::kChar), 15).view(at::kByte).contiguous().unflatten(-1, {-1, 2});
  const auto bytes =
      at::bitwise_or(nibbles.select(-1, 0), at::bitwise_left_shift(nibbles.select(-1, 1), 4));
  return bytes.contiguous().view(at::kInt);
}

Tensor unpack_matrix(const Tensor& words) {
  const bool transposed = words.dim() > 1 && words.stride(-1) != 1 && words.stride(-2) == 1;
  return transposed ? unpack_int4(words.transpose(-1, -2)).transpose(-1, -2) : unpack_int4(words);
}

void store_rounded(const Tensor& values, const Tensor& out, bool four_bits) {
  const auto rounded = at::round(values);
  if (four_bits) {
    const auto packed = pack_int4(rounded.clamp(-8, 7));
    out.copy_(out.scalar_type() == at::kInt ? packed : packed.view(at::kChar));
    return;
  }
  switch (out.scalar_type()) {
    case at::kChar: out.copy_(rounded.clamp(-128, 127)); break;
    case at::kByte: out.copy_(rounded.clamp(0, 255)); break;
    case at::kInt:
      out.copy_(rounded.to(at::kDouble)
              .clamp(std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
      break;
    default:
      raise(kOpParam,
          {"an output of dtype ", out.scalar_type(),
              " is not emulated; int8, uint8, int32 and packed int4 are"},
          /*own=*/true);
  }
}

std::vector<Rows> rows_of(const Tensor& list, int64_t kind, int64_t rows) {
  const auto numbers = list.to(at::kLong).contiguous();
  const int64_t* at = numbers.const_data_ptr<int64_t>();
  const int64_t groups = numbers.size(0);
  std::vector<Rows> out;
  int64_t first = 0;
  for (int64_t i = 0; i < groups; ++i) {
    const int64_t group = kind == 2 ? at[2 * i] : i;
    const int64_t last = kind == 0 ? at[i] : first + at[kind == 2 ? 2 * i + 1 : i];
    require(last >= first, "group_list goes from row ", first, " back to ", last);
    require(last <= rows, "group_list reaches row ", last, " of ", rows);
    if (kind == 2 && last == first) break;  // unused pairs come last
    out.push_back({group, first, last});
    first = last;
  }
  return out;
}

Tensor scaled_by_group(const Tensor& x, const Tensor& scales, const std::vector<Rows>& groups) {
  auto out = x.clone();
  for (const auto& [group, first, last] : groups)
    if (last > first) out.narrow(0, first, last - first).mul_(scales[group].to(x.scalar_type()));
  return out;
}

void quantize_rows(const Tensor& values, const Tensor& out, const Tensor& scale, bool four_bits) {
  if (values.numel() == 0) return;
  const auto most = values.abs().amax(-1, true);
  const auto step = most / largest(four_bits);
  scale.copy_(step.squeeze(-1).view(scale.sizes()));
  // Rows of zeros have scale 0 and stay zero.
  store_rounded(at::where(most > 0, values / step, at::zeros_like(values)), out, four_bits);
}

Tensor integer_product(const Tensor& a, const Tensor& b) {
  if (a.dim() == 2 && b.dim() == 2) return int8_product(a, b);
  std::vector<int64_t> batch =
      at::infer_size(a.sizes().slice(0, a.dim() - 2), b.sizes().slice(0, b.dim() - 2));
  const auto with = [&](const Tensor& x) {
    auto shape = batch;
    shape.insert(shape.end(), {x.size(-2), x.size(-1)});
    return x.expand(shape).reshape({-1, x.size(-2), x.size(-1)});
  };
  const auto left = with(a), right = with(b);
  std::vector<Tensor> parts;
  for (int64_t i = 0; i < left.size(0); ++i) parts.push_back(int8_product(left[i], right[i]));
  batch.insert(batch.end(), {a.size(-2), b.size(-1)});
  return at::stack(parts).view(batch);
}

Tensor scale_values(const Tensor& scale) {
  if (scale.scalar_type() != at::kLong && scale.scalar_type() != at::kUInt64)
    return scale.to(at::kFloat);
  return scale.contiguous().view(at::kLong).bitwise_and(0xFFFFFFFFll).to(at::kInt).view(at::kFloat);
}

Tensor dequantized(const Tensor& weight, const Tensor& scale, const Opt<Tensor>& offset) {
  const auto spread = [&](const Tensor& parameter) {
    const auto fp32 = scale_values(parameter);
    if (fp32.dim() < 2 || fp32.size(-2) <= 1) return fp32.dim() == 2 ? fp32 : fp32.reshape({1, -1});
    require(weight.size(-2) % fp32.size(-2) == 0, fp32.size(-2), " groups do not divide the ",
        weight.size(-2), " rows of the weight");
    return fp32.repeat_interleave(weight.size(-2) / fp32.size(-2), -2);
  };
  auto values = weight.to(at::kFloat);
  if (offset) values = values + spread(*offset);
  return values * spread(scale);
}

}  // namespace emu
