// Matrix products. The last parameter, cubeMathType, allows lower precision than the inputs'; products are computed in full
// precision.
#include "operator/shapes.h"
#include "skinny_matmul.h"

SHAPED(aclnnMm, (Tensor self, Tensor other, Tensor out, int8_t), SHAPE(out, PRODUCT(self, other, 2, 2)), {
  if (is_skinny(self, other, out)) return skinny_matmul(self, other, {}, out);
  at::mm_out(out, self, other);
})
SHAPED(aclnnMatmul, (Tensor self, Tensor other, Tensor out, int8_t), SHAPE(out, PRODUCT(self, other, 1, 8)), {
  if (is_skinny(self, other, out)) return skinny_matmul(self, other, {}, out);
  // The output of a product with a vector may have an additional dimension of 1 (op-plugin's MatmulBackwardKernelNpuOpApi.cpp).
  if (self.dim() == 1 || other.dim() == 1) return void(out.copy_(at::matmul(self, other).view(out.sizes())));
  at::matmul_out(out, self, other);
})
// Batch dimensions may broadcast (op-plugin's test_bmm_compatible.py).
OP(aclnnBatchMatMul, (Tensor self, Tensor other, Tensor out, int8_t), {
  if (self.size(0) == other.size(0)) return void(at::bmm_out(out, self, other));
  at::matmul_out(out, self, other);
})
SHAPED(aclnnMv, (Tensor self, Tensor vector, Tensor out, int8_t),
    (rank("vector", vector, 1), SHAPE(out, PRODUCT(self, vector, 1, 2))), { at::mv_out(out, self, vector); })
SHAPED(
    aclnnDot, (Tensor self, Tensor other, Tensor out), SHAPE(out, PRODUCT(self, other, 1, 1)), { at::dot_out(out, self, other); })
SHAPED(aclnnAddmm, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t),
    (SHAPE(out, PRODUCT(a, b, 2, 2)), EXPANDS(out, self)), {
      const bool plain = beta.toDouble() == 1 && alpha.toDouble() == 1 && self.dim() == 1 && self.size(0) == b.size(1);
      if (plain && self.scalar_type() == at::kBFloat16 && is_skinny(a, b, out)) return skinny_matmul(a, b, self, out);
      at::addmm_out(out, self, a, b, beta, alpha);
    })
SHAPED(aclnnInplaceAddmm, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, int8_t), SHAPE(self, PRODUCT(a, b, 2, 2)),
    { self.addmm_(a, b, beta, alpha); })
OP(aclnnAddbmm, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t),
    { at::addbmm_out(out, self, a, b, beta, alpha); })
// A3 refuses baddbmm's samples in PyTorch's tests, of which some have a self of less than three dimensions (Ascend/pytorch,
// ci-test, disabled_testcases.json: aclnnBaddbmm).
SHAPED(aclnnBaddbmm, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t),
    (rank("self", self, 3), SHAPE(out, PRODUCT(a, b, 3, 3)), EXPANDS(out, self)),
    { at::baddbmm_out(out, self, a, b, beta, alpha); })
SHAPED(aclnnAddmv, (Tensor self, Tensor matrix, Tensor vector, Scalar alpha, Scalar beta, Tensor out, int8_t),
    (SHAPE(out, PRODUCT(matrix, vector, 1, 2)), EXPANDS(out, self)), { at::addmv_out(out, self, matrix, vector, beta, alpha); })
SHAPED(aclnnAddr, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out),
    (rank("a", a, 1), rank("b", b, 1), SHAPE(out, {a.size(0), b.size(0)}), EXPANDS(out, self)),
    { at::addr_out(out, self, a, b, beta, alpha); })
