// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Floating-point formats of eight and four bits. Sources: "OCP 8-bit Floating Point Specification"
// for e4m3 and e5m2, "OCP Microscaling Formats (MX) Specification" for e2m1, e8m0 and shared
// exponents, "Ascend HiFloat8 Format for Deep Learning" (arXiv 2409.16626) for HiF8. Of e1m2
// torch_npu's documentation says that its largest value is 1.75, in the binade of 1.
//
// This header includes nothing of ATen: a test compiles it without the others.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace emu::formats {

// Roundings of casts, by the names of torch_npu: to the nearest with ties to even, towards minus
// infinity, to the nearest with ties away from zero. HiF8 is always rounded in the last way.
enum class Rounding { rint, floor, round };

enum class Encoding { e4m3, e5m2, e2m1, e1m2, hif8, e8m0 };

// The values of all codes, and the codes of all values.
class Format {
 public:
  explicit Format(Encoding encoding) : encoding_(encoding) {
    if (encoding == Encoding::e8m0) {
      for (int code = 0; code < 255; ++code) values_[code] = std::ldexp(1.0F, code - 127);
      values_[255] = kNan;
      return;
    }
    sign_ = encoding == Encoding::e2m1 || encoding == Encoding::e1m2 ? 8 : 128;
    for (int code = 0; code < sign_; ++code) {
      values_[code] = encoding == Encoding::hif8 ? tapered(code) : binary(code);
      values_[code + sign_] = -values_[code];
    }
    if (encoding == Encoding::hif8) values_[sign_] = kNan;  // the code of a negative zero elsewhere
    for (int code = 0; code < sign_; ++code)
      if (std::isfinite(values_[code])) magnitudes_.push_back({values_[code], code});
    std::sort(magnitudes_.begin(), magnitudes_.end());
    largest_ = magnitudes_.back().first;
    // A value in the place of the code behind the largest one: infinity, or NaN of e4m3. What is
    // rounded to it overflows.
    if (encoding == Encoding::e4m3) magnitudes_.push_back({480.0, 0x7F});
    if (encoding == Encoding::e5m2) magnitudes_.push_back({65536.0, 0x7C});
    if (encoding == Encoding::hif8) magnitudes_.push_back({49152.0, 0x6F});
  }

  static const Format& of(Encoding encoding) {
    static const std::array<Format, 6> all{Format(Encoding::e4m3), Format(Encoding::e5m2),
        Format(Encoding::e2m1), Format(Encoding::e1m2), Format(Encoding::hif8),
        Format(Encoding::e8m0)};
    return all[static_cast<size_t>(encoding)];
  }

  float value(uint8_t code) const { return values_[code]; }
  double largest() const { return largest_; }
  // The exponent of the largest value: emax of the Microscaling specification.
  int largest_exponent() const { return std::ilogb(largest_); }
  int bits() const { return sign_ == 8 ? 4 : 8; }

  // The code of a value. With `saturate`, what is above the largest value becomes the largest
  // value, infinity too; without, infinity (e5m2, HiF8) or NaN (e4m3). Four bits have neither:
  // they saturate, and NaN becomes zero.
  uint8_t code(double value, Rounding rounding, bool saturate) const {
    const bool negative = std::signbit(value);
    if (std::isnan(value)) return nan(negative);
    if (encoding_ == Encoding::hif8) rounding = Rounding::round;
    const double magnitude = std::fabs(value);
    const auto above = std::upper_bound(magnitudes_.begin(), magnitudes_.end(), magnitude,
        [](double wanted, const auto& each) { return wanted < each.first; });
    size_t index = static_cast<size_t>(above - magnitudes_.begin()) - 1;
    if (above != magnitudes_.end()) {
      const double low = magnitudes_[index].first, high = above->first;
      if (rounds_up(magnitude, low, high, index, rounding, negative)) ++index;
    }
    while (saturate && magnitudes_[index].first > largest_) --index;
    const int found = magnitudes_[index].second;
    if (encoding_ == Encoding::hif8 && found == 0) return 0;
    return static_cast<uint8_t>(found + (negative ? sign_ : 0));
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  static bool rounds_up(
      double magnitude, double low, double high, size_t index, Rounding rounding, bool negative) {
    if (magnitude == low) return false;
    if (rounding == Rounding::floor) return negative;
    const double below = magnitude - low, rest = high - magnitude;  // exact
    if (below != rest) return below > rest;
    return rounding == Rounding::round || index % 2 == 1;  // the codes of neighbours are one apart
  }

  uint8_t nan(bool negative) const {
    const int sign = negative ? sign_ : 0;
    switch (encoding_) {
      case Encoding::e4m3: return static_cast<uint8_t>(0x7F + sign);
      case Encoding::e5m2: return static_cast<uint8_t>(0x7F + sign);
      case Encoding::hif8: return 0x80;
      case Encoding::e8m0: return 0xFF;
      default: return 0;
    }
  }

  // Sign, exponent and mantissa of fixed widths; an exponent of zero has values below the binades.
  float binary(int code) const {
    const int mantissa_bits = encoding_ == Encoding::e4m3                                  ? 3
                              : encoding_ == Encoding::e5m2 || encoding_ == Encoding::e1m2 ? 2
                                                                                           : 1;
    const int bias = encoding_ == Encoding::e4m3 ? 7 : encoding_ == Encoding::e5m2 ? 15 : 1;
    const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    if (encoding_ == Encoding::e4m3 && code == 0x7F) return kNan;
    if (encoding_ == Encoding::e5m2 && exponent == 31)
      return mantissa ? kNan : std::numeric_limits<float>::infinity();
    const int whole = exponent ? (1 << mantissa_bits) + mantissa : mantissa;
    return std::ldexp(static_cast<float>(whole), std::max(exponent, 1) - bias - mantissa_bits);
  }

  // HiF8: the dot field, a prefix code behind the sign, has the number of the exponent's bits. An
  // exponent is sign and magnitude, without the magnitude's first bit, which is one.
  static float tapered(int code) {
    if (code < 8) return code ? std::ldexp(1.0F, code - 23) : 0.0F;       // 0000: powers of two
    if (code < 16) return std::ldexp(1.0F + (code & 7) / 8.0F, 0);        // 0001: no exponent
    const int width = code < 32 ? 1 : code < 64 ? 2 : code < 96 ? 3 : 4;  // 001, 01, 10, 11
    const int dot_bits = width == 1 ? 3 : 2, mantissa_bits = 7 - dot_bits - width;
    const int field = (code >> mantissa_bits) & ((1 << width) - 1);
    const int half = 1 << (width - 1), magnitude = half + (field & (half - 1));
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    const int exponent = field & half ? -magnitude : magnitude;
    if (width == 4 && exponent == 15 && mantissa) return std::numeric_limits<float>::infinity();
    return std::ldexp(1.0F + std::ldexp(static_cast<float>(mantissa), -mantissa_bits), exponent);
  }

  Encoding encoding_;
  int sign_ = 0;
  double largest_ = 0;
  std::array<float, 256> values_{};
  std::vector<std::pair<double, int>> magnitudes_;  // ascending
};

// How the exponent of an MX group follows from the group's largest magnitude ("scale_alg" of
// npu_dynamic_mx_quant): the specification's rule; the quotient by the format's largest value, or
// by `most`, rounded up to a power of two; the latter for four bits.
enum class ScaleRule { specification = 0, rounded_up = 1, rounded_up_of_four_bits = 2 };

// The code of the shared exponent, e8m0. Groups of zeros have the least one, 2^-127; those with
// infinity or NaN have NaN.
inline uint8_t scale_code(double largest, const Format& format, ScaleRule rule, double most) {
  if (!std::isfinite(largest)) return 0xFF;
  if (largest == 0) return 0;
  int exponent = 0;
  if (rule == ScaleRule::specification) {
    exponent = std::ilogb(largest) - format.largest_exponent();
  } else {
    const auto quotient =
        static_cast<float>(largest) / static_cast<float>(most > 0 ? most : format.largest());
    if (quotient == 0) return 0;
    exponent = std::ilogb(quotient);
    if (quotient > std::ldexp(1.0F, exponent)) ++exponent;
  }
  return static_cast<uint8_t>(std::clamp(exponent, -127, 127) + 127);
}

}  // namespace emu::formats
