// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Linear algebra and distances.
#include <numeric>

#include "operator/shapes.h"
#include "ops/upcast.h"

using namespace emu;

OP(aclnnInverse, (Tensor self, Tensor out), { out.copy_(at::inverse(upcast(self))); })
OP(aclnnSlogdet, (Tensor self, Tensor sign, Tensor log), {
  const auto [s, l] = at::slogdet(upcast(self));
  sign.copy_(s);
  log.copy_(l);
})
OP(aclnnLinalgCholesky, (Tensor self, bool upper, Tensor out),
    { out.copy_(at::linalg_cholesky(upcast(self), upper)); })
OP(aclnnLinalgCross, (Tensor self, Tensor other, int64_t dim, Tensor out),
    { out.copy_(at::linalg_cross(upcast(self), upcast(other), dim)); })
// Modes: 0 reduced, 1 complete, 2 r (op-plugin's LinalgQrKernelNpuOpApi.cpp); Q is empty in the
// last.
OP(aclnnLinalgQr, (Tensor self, int64_t mode, Tensor q, Tensor r), {
  const auto [left, right] = at::linalg_qr(upcast(self), mode == 1   ? "complete"
                                                         : mode == 2 ? "r"
                                                                     : "reduced");
  if (mode != 2) q.copy_(left);
  r.copy_(right);
})
// Returns V, not its transpose (op_plugin_functions.yaml, _linalg_svd). Without compute_uv, U and V
// are not written.
OP(aclnnSvd, (Tensor self, bool full, bool vectors, Tensor s, Tensor u, Tensor v), {
  if (!vectors) return void(s.copy_(at::linalg_svdvals(upcast(self))));
  const auto [left, values, right] = at::linalg_svd(upcast(self), full);
  u.copy_(left);
  s.copy_(values);
  v.copy_(right.mH());
})
OP(aclnnTriangularSolve,
    (Tensor self, Tensor a, bool upper, bool transpose, bool unitriangular, Tensor x, Tensor copy),
    {
      const auto [solution, coefficients] =
          at::triangular_solve(upcast(self), upcast(a), upper, transpose, unitriangular);
      x.copy_(solution);
      copy.copy_(coefficients);
    })
OP(aclnnCdist, (Tensor a, Tensor b, float p, int64_t mode, Tensor out),
    { out.copy_(at::cdist(upcast(a), upcast(b), p, mode)); })
// p is -1 for infinity (op-plugin's CdistBackwardNpuOpApi.cpp).
SHAPED(aclnnCdistBackward, (Tensor grad, Tensor a, Tensor b, Tensor distances, float p, Tensor out),
    (SAME(out, a), SAME(grad, distances)), {
      out.copy_(at::_cdist_backward(upcast(grad), upcast(a), upcast(b),
          p < 0 ? std::numeric_limits<double>::infinity() : p, upcast(distances)));
    })
OP(aclnnPdist, (Tensor self, float p, Tensor out), { out.copy_(at::pdist(upcast(self), p)); })
OP(aclnnInplaceAddr, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha),
    { self.copy_(at::addr(upcast(self), upcast(a), upcast(b), beta, alpha)); })

namespace {
// Order 0, not supported by ATen here: the number of non-zero elements.
Tensor renormed(const Tensor& self, const Scalar& p, int64_t dim, const Scalar& bound) {
  const auto values = upcast(self);
  if (p.toDouble() != 0) return at::renorm(values, p, dim, bound);
  Ints others(self.dim());
  std::iota(others.begin(), others.end(), 0);
  others.erase(others.begin() + at::maybe_wrap_dim(dim, self.dim()));
  const auto norm = values.ne(0).to(at::kFloat).sum(others, true);
  return values * at::where(norm > bound, bound.toDouble() / (norm + 1e-7), at::ones_like(norm));
}
}  // namespace
OP(aclnnRenorm, (Tensor self, Scalar p, int64_t dim, Scalar bound, Tensor out),
    { out.copy_(renormed(self, p, dim, bound)); })
OP(aclnnInplaceRenorm, (Tensor self, Scalar p, int64_t dim, Scalar bound),
    { self.copy_(renormed(self, p, dim, bound)); })
// In float64, where int32 is exact: torch_npu's documentation leaves the bin of a value on a border
// undefined only for floating types.
SHAPED(aclnnHistc, (Tensor self, int64_t bins, Scalar min, Scalar max, Tensor out),
    (require(bins > 0, "bins is ", bins, "; it must be positive"), SHAPE(out, {bins}),
        same_dtype("out", out, "self", self)),
    {
      out.copy_(at::histc(
          self.is_floating_point() ? upcast(self) : self.to(at::kDouble), bins, min, max));
    })
