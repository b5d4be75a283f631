// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Common part of the fused normalizations: checks, and norms in float32 (`fp32` is x in float32).
#pragma once
#include "operator/op.h"

namespace emu {

// The dimensions that gamma covers, the last ones of x.
inline Ints dims_of(const Tensor& x, const Tensor& gamma) {
  Ints dims;
  for (int64_t i = x.dim() - gamma.dim(); i < x.dim(); ++i) dims.push_back(i);
  return dims;
}

inline void check_norm(
    const char* name, const Tensor& x, const Tensor& gamma, const DTypes& dtypes) {
  one_of(name, x, dtypes);
  rank(name, x, 1, 8);
  require(x.dim() >= gamma.dim() && x.sizes().slice(x.dim() - gamma.dim()) == gamma.sizes(),
      "gamma has shape ", gamma.sizes(), ", which is not the end of ", name, "'s ", x.sizes());
}

inline void check_add_norm(
    const Tensor& a, const Tensor& b, const Tensor& gamma, const DTypes& dtypes) {
  check_norm("x1", a, gamma, dtypes);
  same_dtype("x2", b, "x1", a);
  same_dtype("gamma", gamma, "x1", a);
  shape("x2", b, a.sizes());
}

struct Normed {
  Tensor y, rstd;
};
inline Normed rms(const Tensor& fp32, const Tensor& gamma, double epsilon) {
  auto rstd = (fp32.square().mean(dims_of(fp32, gamma), true) + epsilon).rsqrt();
  return {fp32 * rstd * gamma.to(at::kFloat), rstd};
}
inline Tensor sum_of(const Tensor& a, const Tensor& b) {
  return a.to(at::kFloat) + b.to(at::kFloat);
}
// Writes an optional, possibly empty output in its shape.
inline void copy_reshaped(const Opt<Tensor>& out, const Tensor& x) {
  if (out && out->numel() && x.defined()) Tensor(*out).copy_(x.reshape(out->sizes()));
}

}  // namespace emu
