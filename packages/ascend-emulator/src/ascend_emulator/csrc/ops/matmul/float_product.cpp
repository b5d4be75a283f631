// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "float_product.h"

#include "ops/quantization/quantized.h"

namespace emu {

namespace {

constexpr int64_t kBlock = 128;  // columns of a block of x1, rows and columns of one of x2

int64_t parts(int64_t size, int64_t unit) { return (size + unit - 1) / unit; }

// The sizes of an operand's batch, and two more.
std::vector<int64_t> with_batch(const Tensor& matrix, std::initializer_list<int64_t> more) {
  auto sizes = matrix.sizes().slice(0, matrix.dim() - 2).vec();
  sizes.insert(sizes.end(), more);
  return sizes;
}

Tensor repeated(const Tensor& scale, int64_t dim, int64_t times, int64_t size) {
  return scale.to(at::kFloat).repeat_interleave(times, dim).narrow(dim, 0, size);
}

bool is_one_of(int64_t count, int64_t size) { return count == 1 || count == size; }

}  // namespace

bool FloatProduct::blocks() const {
  return !exponents() && row_scales() && scale.dim() > 1 && pertoken->dim() > 1 &&
         !(is_one_of(scale.numel(), n()) && is_one_of(pertoken->numel(), m()));
}

int64_t FloatProduct::rows_of_block() const {
  if (block_rows) return block_rows;
  return pertoken->size(-2) == m() ? 1 : kBlock;
}

void FloatProduct::check() const {
  const auto left = x1.scalar_type(), right = x2.scalar_type();
  const auto eight = [](at::ScalarType type) {
    return type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2;
  };
  rule("float_product.formats",
      left == right || (eight(left) && eight(right)) ||
          (left == at::kFloat8_e4m3fn && is_four_bits(right)),
      "x1 is ", left, " and x2 ", right,
      "; allowed: both float8, both HiF8, both the same float4, and float8_e4m3fn with float4");
  rule("float_product.columns", k() == rows_of_matrix(x2), "x1 has ", k(), " columns and x2 ",
      rows_of_matrix(x2), " rows");
  rule("float_product.exponents-needed",
      (!is_four_bits(left) && !is_four_bits(right)) || exponents(), "scale is ",
      scale.scalar_type(), "; float4 needs float8_e8m0fnu");
  rule("float_product.mixed-columns",
      left == right || !is_four_bits(right) || (k() % 64 == 0 && std::max(k(), n()) < 65536),
      "x1 has ", k(), " columns and x2 ", n(),
      "; with float4 x2 the former must be a multiple of 64, and both below 65536");
  rule("float_product.scales-alike",
      !row_scales() || exponents() == (pertoken->scalar_type() == at::kFloat8_e8m0fnu), "scale is ",
      scale.scalar_type(), " and pertoken_scale ",
      row_scales() ? pertoken->scalar_type() : scale.scalar_type(),
      "; float8_e8m0fnu is allowed for both or neither");
  if (exponents()) check_exponents();
  else check_scales();
}

void FloatProduct::check_exponents() const {
  rule("float_product.hif8-scales", x1.scalar_type() != at::kBits8,
      "x1 is HiF8; float8_e8m0fnu scales are for float8 and float4");
  rule("float_product.exponent-sizes", [&] {
    require(row_scales(), "scale is float8_e8m0fnu; it needs pertoken_scale of the same dtype");
    const int64_t pairs = parts(k(), 2 * kGroup);
    shape("pertoken_scale", *pertoken, with_batch(x1, {m(), pairs, 2}));
    shape("scale", scale, with_batch(x2, {pairs, n(), 2}));
  });
}

void FloatProduct::check_scales() const {
  if (!blocks()) {
    rule("float_product.scale-sizes", [&] {
      require(is_one_of(scale.numel(), n()), "scale has shape ", scale.sizes(),
          "; allowed: one, or ", n(), ", or of blocks of 128 x 128 beside pertoken_scale");
      require(!row_scales() || is_one_of(pertoken->numel(), m()), "pertoken_scale has shape ",
          row_scales() ? pertoken->sizes() : at::IntArrayRef(), "; allowed: one, or ", m());
    });
    return;
  }
  rule("float_product.block-sizes", [&] {
    const int64_t rows = rows_of_block();
    one_of("the first of group_sizes", rows, {int64_t{1}, kBlock});
    shape("pertoken_scale", *pertoken, with_batch(x1, {parts(m(), rows), parts(k(), kBlock)}));
    shape("scale", scale, with_batch(x2, {parts(k(), kBlock), parts(n(), kBlock)}));
  });
  rule("float_product.block-bias", !bias || bias->numel() == 0,
      "bias is given; with scales of blocks only None is allowed");
}

void FloatProduct::run() const {
  auto left = decoded(x1), right = decoded(x2);
  if (exponents()) {
    left = left * repeated(factors_of_groups(*pertoken, k(), true), -1, kGroup, k());
    right = right * repeated(factors_of_groups(scale, k(), false), -2, kGroup, k());
  } else if (blocks()) {
    left = left * repeated(repeated(*pertoken, -2, rows_of_block(), m()), -1, kBlock, k());
    right = right * repeated(repeated(scale, -2, kBlock, k()), -1, kBlock, n());
  }
  auto values = at::matmul(left, right);
  const bool whole = exponents() || blocks(), biased = bias && bias->numel() > 0;
  // A 64-bit scale is the parameter of the cube unit, which adds the bias first.
  const bool bias_first = !whole && !row_scales() && !at::isFloatingType(scale.scalar_type());
  if (biased && bias_first) values = values + bias->to(at::kFloat);
  if (!whole) {
    values = values * scale_values(scale).reshape({-1});
    if (row_scales()) values = values * pertoken->to(at::kFloat).reshape({-1, 1});
  }
  if (biased && !bias_first) values = values + bias->to(at::kFloat);
  if (is_low_precision(out)) encode(values, out, formats::Rounding::rint, true);
  else out.copy_(values);
}

}  // namespace emu
