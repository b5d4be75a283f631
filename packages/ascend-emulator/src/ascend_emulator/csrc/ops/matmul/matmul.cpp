// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Matrix products.
#include "ops/cube_math.h"

#include "operator/shapes.h"
#include "kernels/bf16_matmul.h"

namespace {

constexpr auto kBmm = [](auto& out, const auto& a, const auto& b) { at::bmm_out(out, a, b); };
constexpr auto kMv = [](auto& out, const auto& a, const auto& b) { at::mv_out(out, a, b); };

// out = beta * self + alpha * (a @ b), as one of ATen's functions computes it.
using Sum = Tensor&(
    Tensor&, const Tensor&, const Tensor&, const Tensor&, const at::Scalar&, const at::Scalar&);
auto scaled(Sum& sum, const at::Scalar& beta, const at::Scalar& alpha) {
  return [&sum, beta, alpha](Tensor& out, const Tensor& self, const Tensor& a, const Tensor& b) {
    sum(out, self, a, b, beta, alpha);
  };
}

}  // namespace

SHAPED(aclnnMm, (Tensor self, Tensor other, Tensor out, CubeMath cube),
    (SHAPE(out, PRODUCT(self, other, 2, 2)), cube.check(self, other)), {
      if (has_bf16_matmul(self, other, out)) return bf16_matmul(self, other, {}, out);
      // mm(out_dtype=float32): the sums, which are not rounded. out has a dtype to which theirs
      // converts ("aclnnMm"); that of aclnnBatchMatMul is theirs.
      if (out.scalar_type() == at::kFloat && at::isReducedFloatingType(promoted(self, other)))
        return kMatmul(out, self.to(at::kFloat), other.to(at::kFloat));
      multiply_promoted(kMatmul, out, cube(self), cube(other));
    })
SHAPED(aclnnMatmul, (Tensor self, Tensor other, Tensor out, CubeMath cube),
    (SHAPE(out, PRODUCT(self, other, 1, 8)), cube.check(self, other)), {
      if (has_bf16_matmul(self, other, out)) return bf16_matmul(self, other, {}, out);
      // The output of a matrix-vector multiplication may have an additional dimension of 1
      // (op-plugin's MatmulBackwardKernelNpuOpApi.cpp).
      if (self.dim() == 1 || other.dim() == 1) {
        const auto type = promoted(self, other);
        return void(
            out.copy_(at::matmul(cube(self).to(type), cube(other).to(type)).view(out.sizes())));
      }
      multiply_promoted(kMatmul, out, cube(self), cube(other));
    })
// Batch dimensions may broadcast (op-plugin's test_bmm_compatible.py).
SHAPED(aclnnBatchMatMul, (Tensor self, Tensor other, Tensor out, CubeMath cube),
    (SHAPE(out, PRODUCT(self, other, 3, 3)), cube.check(self, other)), {
      if (self.size(0) == other.size(0))
        return multiply_promoted(kBmm, out, cube(self), cube(other));
      multiply_promoted(kMatmul, out, cube(self), cube(other));
    })
SHAPED(aclnnMv, (Tensor self, Tensor vector, Tensor out, CubeMath cube),
    (rank("vector", vector, 1), SHAPE(out, PRODUCT(self, vector, 1, 2)), cube.check(self, vector)),
    { multiply_promoted(kMv, out, cube(self), cube(vector)); })
SHAPED(aclnnDot, (Tensor self, Tensor other, Tensor out), SHAPE(out, PRODUCT(self, other, 1, 1)),
    { at::dot_out(out, self, other); })
SHAPED(aclnnAddmm,
    (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, CubeMath cube),
    (SHAPE(out, PRODUCT(a, b, 2, 2)), EXPANDS(out, self), cube.check(a, b)), {
      const bool plain = beta.toDouble() == 1 && alpha.toDouble() == 1 && self.dim() == 1 &&
                         self.size(0) == b.size(1);
      if (plain && self.scalar_type() == at::kBFloat16 && has_bf16_matmul(a, b, out))
        return bf16_matmul(a, b, self, out);
      multiply_promoted(scaled(at::addmm_out, beta, alpha), out, self, cube(a), cube(b));
    })
SHAPED(aclnnInplaceAddmm,
    (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, CubeMath cube),
    (SHAPE(self, PRODUCT(a, b, 2, 2)), cube.check(a, b)),
    { multiply_promoted(scaled(at::addmm_out, beta, alpha), self, self, cube(a), cube(b)); })
SHAPED(aclnnAddbmm,
    (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, CubeMath cube),
    cube.check(a, b), {
      const auto product = scaled(at::addbmm_out, beta, alpha);
      // ATen rounds the sum of each matrix to 16 bits.
      if (at::isReducedFloatingType(out.scalar_type())) {
        auto sums = at::empty(out.sizes(), out.options().dtype(at::kFloat));
        product(sums, self.to(at::kFloat), cube(a).to(at::kFloat), cube(b).to(at::kFloat));
        return void(out.copy_(sums));
      }
      multiply_promoted(product, out, self, cube(a), cube(b));
    })
// A3 refuses baddbmm's samples in PyTorch's tests, of which some have a self of less than three
// dimensions (Ascend/pytorch, ci-test, disabled_testcases.json: aclnnBaddbmm).
SHAPED(aclnnBaddbmm,
    (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, CubeMath cube),
    (rank("self", self, 3), SHAPE(out, PRODUCT(a, b, 3, 3)), EXPANDS(out, self), cube.check(a, b)),
    { multiply_promoted(scaled(at::baddbmm_out, beta, alpha), out, self, cube(a), cube(b)); })
SHAPED(aclnnAddmv,
    (Tensor self, Tensor matrix, Tensor vector, Scalar alpha, Scalar beta, Tensor out,
        CubeMath cube),
    (SHAPE(out, PRODUCT(matrix, vector, 1, 2)), EXPANDS(out, self), cube.check(matrix, vector)), {
      multiply_promoted(scaled(at::addmv_out, beta, alpha), out, self, cube(matrix), cube(vector));
    })
SHAPED(aclnnAddr, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out),
    (rank("a", a, 1), rank("b", b, 1), SHAPE(out, {a.size(0), b.size(0)}), EXPANDS(out, self)),
    { at::addr_out(out, self, a, b, beta, alpha); })

// mat2 in FRACTAL_NZ; float16 and bfloat16 ("aclnnMatmulWeightNz" of CANN's API reference).
SHAPED(aclnnMatmulWeightNz, (Tensor self, Weight mat2, Tensor out, CubeMath),
    SHAPE(out, PRODUCT(self, mat2, 2, 2)), { multiply_into(kMatmul, out, self, mat2); })
SHAPED(aclnnBatchMatMulWeightNz, (Tensor self, Weight mat2, Tensor out, CubeMath),
    SHAPE(out, PRODUCT(self, mat2, 3, 3)), { multiply_into(kMatmul, out, self, mat2); })
SHAPED(aclnnAddmmWeightNz,
    (Tensor self, Tensor mat1, Weight mat2, Scalar beta, Scalar alpha, Tensor out, CubeMath),
    (SHAPE(out, PRODUCT(mat1, mat2, 2, 2)), EXPANDS(out, self)),
    { multiply_into(scaled(at::addmm_out, beta, alpha), out, self, mat1, mat2); })
