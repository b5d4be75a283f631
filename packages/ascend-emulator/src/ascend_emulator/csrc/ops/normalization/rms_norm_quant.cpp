// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// RMSNorm with quantized outputs. Rules: torch_npu's documentation of npu_add_rms_norm_quant,
// npu_add_rms_norm_dynamic_quant and npu_rms_norm_quant (torch_npu/_op_plugin_docs.py), and the
// golden functions of op-plugin's tests; argument order: op-plugin's call sites.
#include "normalization.h"
#include "ops/quantization/low_precision.h"

namespace {

using namespace emu;

// Rounds to int8, or to int4, eight in an int32, lowest first.
void put_integers(Tensor out, const Tensor& x) {
  if (out.scalar_type() == at::kChar) {
    out.copy_(x.round().clamp_(-128, 127));
    return;
  }
  const auto nibbles = x.round().clamp_(-8, 7).to(at::kLong).bitwise_and(15).unflatten(-1, {-1, 8});
  out.copy_(nibbles.bitwise_left_shift(at::arange(8) * 4).sum(-1).to(at::kInt));
}

// Integers, or on Ascend950 float8 or HiF8.
void put_quantized(const Tensor& out, const Tensor& x) {
  if (is_low_precision(out)) encode(x, out, formats::Rounding::rint, true);
  else put_integers(out, x);
}

void check_factor(const char* name, const Opt<Tensor>& x, const Tensor& gamma) {
  if (!x) return;
  require(x->numel() == gamma.numel() || x->numel() == 1, name, " has shape ", x->sizes(),
      "; it must be gamma's ", gamma.sizes());
}

// y / scale + offset, or y * scale + offset.
Tensor quantized(
    const Tensor& y, const Opt<Tensor>& scale, const Opt<Tensor>& offset, bool divides) {
  if (!scale) return {};
  const auto spread = [&](const Tensor& x) { return x.to(at::kFloat).view(-1); };
  auto out = divides ? y / spread(*scale) : y * spread(*scale);
  return offset ? out + spread(*offset) : out;
}

// Dynamic quantization per row: the largest magnitude becomes the type's maximum.
void put_dynamic(const Tensor& y, const Opt<Tensor>& smooth, Tensor out, Tensor scale) {
  const auto smoothed = smooth ? y * smooth->to(at::kFloat) : y;
  auto largest = smoothed.abs().amax(-1, true) / (out.scalar_type() == at::kChar ? 127.0 : 7.0);
  put_integers(out, smoothed / largest.masked_fill(largest == 0, 1));
  scale.copy_(largest.squeeze(-1));
}

}  // namespace

CHECKED(aclnnAddRmsNormQuantV2,
    (Tensor a, Tensor b, Tensor gamma, Opt<Tensor> scale1, Opt<Tensor> scale2, Opt<Tensor> zero1,
        Opt<Tensor> zero2, Opt<Tensor> beta, int64_t axis, double epsilon, bool divides, Tensor y1,
        Tensor y2, Tensor sum, Opt<Tensor> normed),
    {
      check_add_norm(a, b, gamma, is_chip("Ascend950") ? kFloating : kHalves);
      rule("add_rms_norm_quant.factors", [&] {
        for (const auto& [name, x] : {std::pair{"scales1", &scale1}, std::pair{"scales2", &scale2},
                 std::pair{"zero_points1", &zero1}, std::pair{"zero_points2", &zero2}})
          check_factor(name, *x, gamma);
      });
      COMPUTE {
        const auto total = sum_of(a, b);
        auto y = rms(total, gamma, epsilon).y;
        if (beta) y = y + beta->to(at::kFloat);
        sum.copy_(total);
        copy_reshaped(normed, y);
        const auto flat = y.reshape({-1, gamma.numel()});
        put_quantized(y1.view({-1, gamma.numel()}), quantized(flat, scale1, zero1, divides));
        const auto second = y2.view({-1, gamma.numel()});
        // Without a second scale, Ascend950 quantizes by one (op-plugin's
        // test_npu_add_rms_norm_quant.py).
        if (scale2) put_quantized(second, quantized(flat, scale2, zero2, divides));
        else if (is_chip("Ascend950")) put_quantized(second, flat);
      };
    })
// The second scale and zero points must be None and div_mode true (op-plugin's
// AddRmsNormQuantKernelOpApi.cpp).
CHECKED(aclnnAddRmsNormQuant,
    (Tensor a, Tensor b, Tensor gamma, Opt<Tensor> scale1, Opt<Tensor> scale2, Opt<Tensor> zero1,
        Opt<Tensor> zero2, int64_t axis, double epsilon, bool divides, Tensor y1, Tensor y2,
        Tensor sum),
    {
      require((!scale2 && !zero2) || is_chip("Ascend950"),
          "scales2 or zero_points2 is given; only None is allowed");
      require(divides, "div_mode is false; only true is allowed");
      return body_aclnnAddRmsNormQuantV2(
          a, b, gamma, scale1, scale2, zero1, zero2, {}, axis, epsilon, true, y1, y2, sum, {});
    })
CHECKED(aclnnAddRmsNormDynamicQuantV2,
    (Tensor a, Tensor b, Tensor gamma, Opt<Tensor> smooth1, Opt<Tensor> smooth2, Opt<Tensor> beta,
        double epsilon, Opt<Bools> mask, Tensor y1, Tensor y2, Tensor sum, Tensor scale1,
        Tensor scale2),
    {
      check_add_norm(a, b, gamma, kHalves);
      const bool chosen = mask && !mask->empty();
      rule("add_rms_norm_dynamic_quant.second-scale", chosen || !smooth2 || smooth1,
          "smooth_scale2 is given without smooth_scale1");
      const bool first = chosen ? mask->at(0) : true,
                 second = chosen ? mask->at(1) : smooth1 && smooth2;
      rule("add_rms_norm_dynamic_quant.output-mask",
          !chosen || ((first || second) && (!smooth1 || first) && (!smooth2 || second)),
          "output_mask leaves out both outputs, or one whose smooth_scale is given");
      COMPUTE {
        const auto total = sum_of(a, b);
        auto y = rms(total, gamma, epsilon).y;
        if (beta) y = y + beta->to(at::kFloat);
        sum.copy_(total);
        if (first) put_dynamic(y, smooth1, y1, scale1);
        if (second) put_dynamic(y, smooth2, y2, scale2);
      };
    })
CHECKED(aclnnRmsNormQuantV3,
    (Tensor x, Tensor gamma, Tensor scale, Opt<Tensor> offset, Opt<Tensor> beta, double epsilon,
        bool divides, bool, Tensor y, Opt<Tensor> rstd),
    {
      check_factor("scale", scale, gamma);
      check_factor("offset", offset, gamma);
      COMPUTE {
        const auto normed = rms(x.to(at::kFloat), gamma.view(-1), epsilon);
        auto out = normed.y;
        if (beta) out = out + beta->to(at::kFloat).view(-1);
        put_quantized(y, quantized(out, scale, offset, divides));
        copy_reshaped(rstd, normed.rstd);
      };
    })
CHECKED(aclnnRmsNormQuant,
    (Tensor x, Tensor gamma, Tensor beta, Tensor scale, Tensor offset, double epsilon, Tensor y), {
      return body_aclnnRmsNormQuantV3(x, gamma, scale, offset, beta, epsilon, false, false, y, {});
    })
