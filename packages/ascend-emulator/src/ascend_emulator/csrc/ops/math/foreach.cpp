// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Operators on lists of tensors. The older of two versions has its scalar in a tensor of one
// element (op-plugin).
#include "families.h"

namespace {
using namespace emu;

// The modes of op-plugin's ForeachRoundOffNumberKernelNpuOpApi.cpp.
Tensor rounded(const Tensor& self, int64_t mode) {
  switch (mode) {
    case 1: return at::round(self);
    case 2: return at::floor(self);
    case 3: return at::ceil(self);
    case 5: return at::trunc(self);
    case 7: return at::frac(self);
  }
  raise(
      kOpParam, {"round mode ", mode, "; supported: 1 round, 2 floor, 3 ceil, 5 trunc and 7 frac"});
}
}  // namespace

FOREACH(LerpList, (Tensors self, Tensors end, Tensors weight, Tensors out),
    at::lerp(upcast(self[i]), upcast(end[i]), upcast(weight[i])))
FOREACH(LerpScalar, (Tensors self, Tensors end, Scalar weight, Tensors out),
    at::lerp(upcast(self[i]), upcast(end[i]), weight))
OP(aclnnForeachPowScalarAndTensor, (Scalar self, Tensors exponent, Tensors out),
    { each(out, [&](size_t i) { return at::pow(self, upcast(exponent[i])); }); })
OP(aclnnForeachRoundOffNumberV2, (Tensors self, Scalar mode, Tensors out),
    { each(out, [&](size_t i) { return rounded(upcast(self[i]), mode.toLong()); }); })
CHECKED(aclnnForeachRoundOffNumber, (Tensors self, Tensor mode, Tensors out), {
  one_number("roundMode", mode);
  COMPUTE {
    const auto number = mode.item<int64_t>();
    each(out, [&](size_t i) { return rounded(upcast(self[i]), number); });
  };
})
OP(aclnnForeachCopy, (Tensors self, Tensors out), { each(out, [&](size_t i) { return self[i]; }); })
OP(aclnnForeachZeroInplace, (Tensors self), {
  for (auto& tensor : self) tensor.zero_();
})
OP(aclnnForeachNorm, (Tensors self, Scalar order, Tensors out),
    { each(out, [&](size_t i) { return at::linalg_vector_norm(upcast(self[i]), order); }); })
// Sets found_inf if a gradient is not finite; gradients are scaled in any case (torch's amp
// documentation).
OP(aclnnForeachNonFiniteCheckAndUnscale, (Tensors gradients, Tensor found, Tensor scale), {
  for (auto& gradient : gradients) {
    if (!at::isfinite(gradient).all().item<bool>()) found.fill_(1);
    gradient.copy_(upcast(gradient) * scale);
  }
})
OP(aclnnAmpUpdateScale,
    (Tensor scale, Tensor tracker, Tensor found, double growth, double backoff, int64_t interval,
        Tensor new_scale, Tensor new_tracker),
    {
      new_scale.copy_(scale);
      new_tracker.copy_(tracker);
      at::_amp_update_scale_(new_scale, new_tracker, found, growth, backoff, interval);
    })
