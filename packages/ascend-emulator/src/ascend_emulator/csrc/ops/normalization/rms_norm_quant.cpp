// Normalizations with an addition before, or a quantization behind. Rules: torch_npu's documentation of npu_add_rms_norm_quant,
// npu_add_rms_norm_dynamic_quant, npu_add_rms_norm_cast, npu_rms_norm_quant, npu_gemma_rms_norm, npu_group_norm_silu and npu_group_norm_swish
// (torch_npu/_op_plugin_docs.py), and the golden functions of op-plugin's tests; argument order: op-plugin's call sites.
#include "core/op.h"

namespace {

using namespace emu;

Ints dims_of(const Tensor& x, const Tensor& gamma) {
  Ints dims;
  for (int64_t i = x.dim() - gamma.dim(); i < x.dim(); ++i) dims.push_back(i);
  return dims;
}

void check_norm(const char* name, const Tensor& x, const Tensor& gamma, const DTypes& dtypes) {
  one_of(name, x, dtypes);
  rank(name, x, 1, 8);
  check(x.dim() >= gamma.dim() && x.sizes().slice(x.dim() - gamma.dim()) == gamma.sizes(), kOpParam, "gamma has shape ", gamma.sizes(), ", which is not the end of ", name, "'s ", x.sizes());
}

void check_pair(const Tensor& a, const Tensor& b, const Tensor& gamma, const DTypes& dtypes) {
  check_norm("x1", a, gamma, dtypes);
  same_dtype("x2", b, "x1", a);
  same_dtype("gamma", gamma, "x1", a);
  shape("x2", b, a.sizes());
}

struct Normed { Tensor y, rstd; };
Normed rms(const Tensor& wide, const Tensor& gamma, double epsilon) {
  auto rstd = (wide.square().mean(dims_of(wide, gamma), true) + epsilon).rsqrt();
  return {wide * rstd * gamma.to(at::kFloat), rstd};
}
Tensor sum_of(const Tensor& a, const Tensor& b) { return a.to(at::kFloat) + b.to(at::kFloat); }
void give(const Opt<Tensor>& out, const Tensor& x) {
  if (out && out->numel() && x.defined()) Tensor(*out).copy_(x.reshape(out->sizes()));
}

// Whole numbers into an int8 tensor, or eight int4 to an int32, lowest first.
void put_integers(Tensor out, const Tensor& x) {
  if (out.scalar_type() == at::kChar) {
    out.copy_(x.round().clamp_(-128, 127));
    return;
  }
  const auto nibbles = x.round().clamp_(-8, 7).to(at::kLong).bitwise_and(15).unflatten(-1, {-1, 8});
  out.copy_(nibbles.bitwise_left_shift(at::arange(8) * 4).sum(-1).to(at::kInt));
}
void check_integers(const char* name, const Tensor& out) { one_of(name, out, {at::kChar, at::kInt}); }

void check_factor(const char* name, const Opt<Tensor>& x, const Tensor& gamma, const DTypes& dtypes) {
  if (!x) return;
  one_of(name, *x, dtypes);
  check(x->numel() == gamma.numel() || x->numel() == 1, kOpParam, name, " has shape ", x->sizes(), "; it must be gamma's ", gamma.sizes());
}

// y / scale + offset, or y * scale + offset.
Tensor quantized(const Tensor& y, const Opt<Tensor>& scale, const Opt<Tensor>& offset, bool divides) {
  if (!scale) return {};
  const auto spread = [&](const Tensor& x) { return x.to(at::kFloat).view(-1); };
  auto out = divides ? y / spread(*scale) : y * spread(*scale);
  return offset ? out + spread(*offset) : out;
}

std::function<void()> add_rms_norm_quant(const Tensor& a, const Tensor& b, const Tensor& gamma, const Opt<Tensor>& scale1, const Opt<Tensor>& scale2, const Opt<Tensor>& zero1,
                                         const Opt<Tensor>& zero2, const Opt<Tensor>& beta, int64_t axis, double epsilon, bool divides, Tensor y1, Tensor y2, Tensor sum,
                                         const Opt<Tensor>& normed) {
  check_pair(a, b, gamma, kHalves);
  one_of<int64_t>("axis", axis, {-1});
  check(scale1.has_value(), kOpParam, "scales1 is needed");
  for (const auto& [name, x] : {std::pair{"scales1", &scale1}, std::pair{"scales2", &scale2}}) check_factor(name, *x, gamma, {at::kFloat, at::kBFloat16, at::kHalf});
  for (const auto& [name, x] : {std::pair{"zero_points1", &zero1}, std::pair{"zero_points2", &zero2}}) check_factor(name, *x, gamma, {at::kInt, at::kBFloat16, at::kHalf});
  if (beta) { same_dtype("beta", *beta, "gamma", gamma); shape("beta", *beta, gamma.sizes()); }
  one_of("y1", y1, {at::kChar});
  COMPUTE {
    const auto total = sum_of(a, b);
    auto y = rms(total, gamma, epsilon).y;
    if (beta) y = y + beta->to(at::kFloat);
    sum.copy_(total);
    give(normed, y);
    const auto flat = y.reshape({-1, gamma.numel()});
    put_integers(y1.view({-1, gamma.numel()}), quantized(flat, scale1, zero1, divides));
    if (scale2) put_integers(y2.view({-1, gamma.numel()}), quantized(flat, scale2, zero2, divides));
  };
}

// y scaled row by row so that its largest magnitude becomes the type's largest number.
void put_dynamic(const Tensor& y, const Opt<Tensor>& smooth, Tensor out, Tensor scale) {
  const auto smoothed = smooth ? y * smooth->to(at::kFloat) : y;
  auto largest = smoothed.abs().amax(-1, true) / (out.scalar_type() == at::kChar ? 127.0 : 7.0);
  put_integers(out, smoothed / largest.masked_fill(largest == 0, 1));
  scale.copy_(largest.squeeze(-1));
}

std::function<void()> rms_norm_quant(const Tensor& x, const Tensor& gamma, const Tensor& scale, const Opt<Tensor>& offset, const Opt<Tensor>& beta, double epsilon, bool divides, Tensor y,
                                     const Opt<Tensor>& rstd) {
  one_of("x", x, kHalves);
  same_dtype("gamma", gamma, "x", x);
  rank("gamma", gamma, 1, 2);
  check(gamma.numel() == x.size(-1), kOpParam, "gamma has shape ", gamma.sizes(), " and x's last dimension ", x.size(-1));
  check(x.size(-1) * x.element_size() >= 32, kOpParam, "x's last dimension has ", x.size(-1) * x.element_size(), " bytes; at least 32 are allowed");
  if (beta) same_dtype("beta", *beta, "x", x);
  check_factor("scale", scale, gamma, {at::kFloat, at::kHalf, at::kBFloat16});
  check_factor("offset", offset, gamma, {at::kChar, at::kInt, at::kFloat, at::kHalf, at::kBFloat16});
  check_integers("y", y);
  COMPUTE {
    const auto normed = rms(x.to(at::kFloat), gamma.view(-1), epsilon);
    auto out = normed.y;
    if (beta) out = out + beta->to(at::kFloat).view(-1);
    put_integers(y, quantized(out, scale, offset, divides));
    give(rstd, normed.rstd);
  };
}

struct LayerNormed { Tensor y, mean, rstd; };
LayerNormed layer(const Tensor& wide, const Tensor& gamma, const Tensor& beta, double epsilon) {
  const auto dims = dims_of(wide, gamma);
  const auto mean = wide.mean(dims, true), away = wide - mean;
  const auto rstd = (away.square().mean(dims, true) + epsilon).rsqrt();
  return {away * rstd * gamma.to(at::kFloat) + beta.to(at::kFloat), mean, rstd};
}

// Of a layer norm of `wide` with respect to it, gamma and beta.
struct LayerGrads { Tensor x, gamma, beta; };
LayerGrads layer_grad(const Tensor& grad, const Tensor& wide, const Tensor& gamma, const Tensor& mean, const Tensor& rstd) {
  const auto dims = dims_of(wide, gamma);
  Ints like(wide.dim(), 1);
  for (int64_t i = 0; i < wide.dim() - gamma.dim(); ++i) like[i] = wide.size(i);
  const auto g = grad.to(at::kFloat), inverse = rstd.reshape(like), normed = (wide - mean.reshape(like)) * inverse, scaled = g * gamma.to(at::kFloat);
  return {inverse * (scaled - scaled.mean(dims, true) - normed * (scaled * normed).mean(dims, true)), at::sum_to(g * normed, gamma.sizes()), at::sum_to(g, gamma.sizes())};
}

struct GroupNormed { Tensor y, mean, rstd; };
GroupNormed group(const Tensor& x, const Opt<Tensor>& weight, const Opt<Tensor>& bias, int64_t groups, double epsilon) {
  const auto wide = x.to(at::kFloat).reshape({x.size(0), groups, -1});
  const auto mean = wide.mean(-1, true), away = wide - mean, rstd = (away.square().mean(-1, true) + epsilon).rsqrt();
  auto y = (away * rstd).reshape(x.sizes());
  Ints by_channel(x.dim(), 1);
  by_channel[1] = x.size(1);
  if (weight) y = y * weight->to(at::kFloat).view(by_channel);
  if (bias) y = y + bias->to(at::kFloat).view(by_channel);
  return {y, mean.squeeze(-1), rstd.squeeze(-1)};
}

void check_groups(const Tensor& x, const Opt<Tensor>& weight, const Opt<Tensor>& bias, int64_t groups) {
  one_of("input", x, kFloating);
  rank("input", x, 2, 8);
  check(groups > 0 && x.size(1) % groups == 0, kOpParam, "group is ", groups, "; it must divide input's ", x.size(1), " channels");
  for (const auto& [name, w] : {std::pair{"weight", &weight}, std::pair{"bias", &bias}})
    if (*w) shape(name, **w, {x.size(1)});
}

}  // namespace

CHECKED(aclnnAddRmsNormCast, (Tensor a, Tensor b, Tensor gamma, double epsilon, Tensor wide, Tensor y, Tensor rstd, Tensor sum), {
  check_pair(a, b, gamma, kHalves);
  COMPUTE {
    sum.copy_(sum_of(a, b));
    const auto normed = rms(sum.to(at::kFloat), gamma, epsilon);
    y.copy_(normed.y);
    wide.copy_(y);
    give(rstd, normed.rstd);
  };
})
CHECKED(aclnnInplaceAddRmsNorm, (Tensor a, Tensor b, Tensor gamma, double epsilon, Tensor rstd), {
  check_pair(a, b, gamma, kFloating);
  COMPUTE {
    b.copy_(sum_of(a, b));
    const auto normed = rms(b.to(at::kFloat), gamma, epsilon);
    a.copy_(normed.y);
    give(rstd, normed.rstd);
  };
})
// The weight is 1 + gamma.
CHECKED(aclnnGemmaRmsNorm, (Tensor x, Tensor gamma, double epsilon, Tensor y, Tensor rstd), {
  check_norm("input", x, gamma, kFloating);
  same_dtype("gamma", gamma, "input", x);
  COMPUTE {
    const auto normed = rms(x.to(at::kFloat), gamma.to(at::kFloat) + 1, epsilon);
    y.copy_(normed.y);
    give(rstd, normed.rstd);
  };
})
CHECKED(aclnnRmsNormGrad, (Tensor grad, Tensor x, Tensor rstd, Tensor gamma, Tensor x_grad, Tensor gamma_grad), {
  check_norm("self", x, gamma, kFloating);
  shape("dy", grad, x.sizes());
  COMPUTE {
    const auto dims = dims_of(x, gamma);
    Ints like(x.dim(), 1);
    for (int64_t i = 0; i < x.dim() - gamma.dim(); ++i) like[i] = x.size(i);
    const auto g = grad.to(at::kFloat), inverse = rstd.to(at::kFloat).reshape(like), normed = x.to(at::kFloat) * inverse, scaled = g * gamma.to(at::kFloat);
    x_grad.copy_(inverse * (scaled - normed * (scaled * normed).mean(dims, true)));
    gamma_grad.copy_(at::sum_to(g * normed, gamma.sizes()));
  };
})

CHECKED(aclnnAddRmsNormQuantV2,
        (Tensor a, Tensor b, Tensor gamma, Opt<Tensor> scale1, Opt<Tensor> scale2, Opt<Tensor> zero1, Opt<Tensor> zero2, Opt<Tensor> beta, int64_t axis, double epsilon, bool divides,
         Tensor y1, Tensor y2, Tensor sum, Opt<Tensor> normed),
        { return add_rms_norm_quant(a, b, gamma, scale1, scale2, zero1, zero2, beta, axis, epsilon, divides, y1, y2, sum, normed); })
CHECKED(aclnnAddRmsNormDynamicQuantV2,
        (Tensor a, Tensor b, Tensor gamma, Opt<Tensor> smooth1, Opt<Tensor> smooth2, Opt<Tensor> beta, double epsilon, Opt<Bools> mask, Tensor y1, Tensor y2, Tensor sum, Tensor scale1,
         Tensor scale2), {
  check_pair(a, b, gamma, kHalves);
  rank("gamma", gamma, 1);
  for (const auto& [name, x] : {std::pair{"smooth_scale1", &smooth1}, std::pair{"smooth_scale2", &smooth2}, std::pair{"beta", &beta}})
    if (*x) { same_dtype(name, **x, "gamma", gamma); shape(name, **x, gamma.sizes()); }
  const bool chosen = mask && !mask->empty();
  check(chosen || !smooth2 || smooth1, kOpParam, "smooth_scale2 is given without smooth_scale1");
  const bool first = chosen ? mask->at(0) : true, second = chosen ? mask->at(1) : smooth1 && smooth2;
  check(!chosen || ((!smooth1 || first) && (!smooth2 || second)), kOpParam, "a smooth_scale is given for an output that output_mask leaves out");
  check_integers("y1", y1);
  COMPUTE {
    const auto total = sum_of(a, b);
    auto y = rms(total, gamma, epsilon).y;
    if (beta) y = y + beta->to(at::kFloat);
    sum.copy_(total);
    if (first) put_dynamic(y, smooth1, y1, scale1);
    if (second) put_dynamic(y, smooth2, y2, scale2);
  };
})
CHECKED(aclnnRmsNormQuant, (Tensor x, Tensor gamma, Tensor beta, Tensor scale, Tensor offset, double epsilon, Tensor y),
        { return rms_norm_quant(x, gamma, scale, offset, beta, epsilon, false, y, {}); })
CHECKED(aclnnRmsNormQuantV3,
        (Tensor x, Tensor gamma, Tensor scale, Opt<Tensor> offset, Opt<Tensor> beta, double epsilon, bool divides, bool, Tensor y, Opt<Tensor> rstd),
        { return rms_norm_quant(x, gamma, scale, offset, beta, epsilon, divides, y, rstd); })

CHECKED(aclnnAddLayerNorm,
        (Tensor a, Tensor b, Tensor gamma, Tensor beta, Opt<Tensor> bias, double epsilon, bool keeps_sum, Tensor y, Tensor mean, Tensor rstd, Tensor sum), {
  check_norm("x1", a, gamma, kFloating);
  shape("x2", b, a.sizes());
  shape("beta", beta, gamma.sizes());
  COMPUTE {
    auto total = sum_of(a, b);
    if (bias) total = total + bias->to(at::kFloat);
    const auto normed = layer(total, gamma, beta, epsilon);
    y.copy_(normed.y);
    give(mean, normed.mean);
    give(rstd, normed.rstd);
    if (keeps_sum) sum.copy_(total);
  };
})
CHECKED(aclnnAddLayerNormGrad,
        (Tensor grad, Tensor a, Tensor b, Tensor rstd, Tensor mean, Tensor gamma, Opt<Tensor> sum_grad, Tensor x_grad, Tensor gamma_grad, Tensor beta_grad), {
  check_norm("x1", a, gamma, kFloating);
  shape("dy", grad, a.sizes());
  COMPUTE {
    const auto grads = layer_grad(grad, sum_of(a, b), gamma, mean, rstd);
    x_grad.copy_(sum_grad ? grads.x + sum_grad->to(at::kFloat) : grads.x);
    gamma_grad.copy_(grads.gamma);
    beta_grad.copy_(grads.beta);
  };
})
// The layer norm of alpha * x + gx.
CHECKED(aclnnDeepNorm, (Tensor x, Tensor gx, Tensor beta, Tensor gamma, double alpha, double epsilon, Tensor mean, Tensor rstd, Tensor y), {
  check_norm("x", x, gamma, kFloating);
  shape("gx", gx, x.sizes());
  shape("beta", beta, gamma.sizes());
  COMPUTE {
    const auto normed = layer(x.to(at::kFloat) * alpha + gx.to(at::kFloat), gamma, beta, epsilon);
    y.copy_(normed.y);
    give(mean, normed.mean);
    give(rstd, normed.rstd);
  };
})
CHECKED(aclnnDeepNormGrad,
        (Tensor grad, Tensor x, Tensor gx, Tensor gamma, Tensor mean, Tensor rstd, double alpha, Tensor x_grad, Tensor gx_grad, Tensor beta_grad, Tensor gamma_grad), {
  check_norm("x", x, gamma, kFloating);
  shape("dy", grad, x.sizes());
  COMPUTE {
    const auto grads = layer_grad(grad, x.to(at::kFloat) * alpha + gx.to(at::kFloat), gamma, mean, rstd);
    x_grad.copy_(grads.x * alpha);
    gx_grad.copy_(grads.x);
    gamma_grad.copy_(grads.gamma);
    beta_grad.copy_(grads.beta);
  };
})

CHECKED(aclnnGroupNormSilu, (Tensor x, Opt<Tensor> weight, Opt<Tensor> bias, int64_t groups, double epsilon, Tensor out, Tensor mean, Tensor rstd), {
  check_groups(x, weight, bias, groups);
  COMPUTE {
    const auto normed = group(x, weight, bias, groups, epsilon);
    out.copy_(at::silu(normed.y));
    mean.copy_(normed.mean);
    rstd.copy_(normed.rstd);
  };
})
CHECKED(aclnnGroupNormSwish,
        (Tensor x, Tensor weight, Tensor bias, int64_t groups, Text, double epsilon, bool activates, double swish, Tensor out, Tensor mean, Tensor rstd), {
  check_groups(x, weight, bias, groups);
  same_dtype("weight", weight, "input", x);
  same_dtype("bias", bias, "input", x);
  COMPUTE {
    const auto normed = group(x, weight, bias, groups, epsilon);
    out.copy_(activates ? normed.y * at::sigmoid(normed.y * swish) : normed.y);
    mean.copy_(normed.mean);
    rstd.copy_(normed.rstd);
  };
})
CHECKED(aclnnGroupNormSwishGrad,
        (Tensor grad, Tensor mean, Tensor rstd, Tensor x, Tensor weight, Tensor bias, int64_t groups, Text, double swish, bool wants_weight, bool wants_bias, Tensor x_grad,
         Tensor weight_grad, Tensor bias_grad), {
  check_groups(x, weight, bias, groups);
  COMPUTE {
    const Ints grouped{x.size(0), groups, -1};
    Ints by_channel(x.dim(), 1);
    by_channel[1] = x.size(1);
    const auto inverse = rstd.to(at::kFloat).view({x.size(0), groups, 1});
    const auto normed = (x.to(at::kFloat).reshape(grouped) - mean.to(at::kFloat).view({x.size(0), groups, 1})) * inverse;
    const auto w = weight.to(at::kFloat).view(by_channel), y = normed.reshape(x.sizes()) * w + bias.to(at::kFloat).view(by_channel);
    const auto gate = at::sigmoid(y * swish), g = grad.to(at::kFloat) * (gate + y * swish * gate * (1 - gate));
    const auto scaled = (g * w).reshape(grouped);
    x_grad.copy_((inverse * (scaled - scaled.mean(-1, true) - normed * (scaled * normed).mean(-1, true))).reshape(x.sizes()));
    if (wants_weight) weight_grad.copy_(at::sum_to(g * normed.reshape(x.sizes()), by_channel).view(-1));
    if (wants_bias) bias_grad.copy_(at::sum_to(g, by_channel).view(-1));
  };
})
