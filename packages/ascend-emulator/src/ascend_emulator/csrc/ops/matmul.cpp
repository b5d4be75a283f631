// Matrix products. The last parameter, cubeMathType, allows the cube unit lower precision than the inputs'; computing in full is within it.
#include "../core/op.h"

OP(aclnnMm, (Tensor self, Tensor other, Tensor out, int8_t), { at::mm_out(out, self, other); })
OP(aclnnMatmul, (Tensor self, Tensor other, Tensor out, int8_t), { at::matmul_out(out, self, other); })
OP(aclnnBatchMatMul, (Tensor self, Tensor other, Tensor out, int8_t), { at::bmm_out(out, self, other); })
OP(aclnnMv, (Tensor self, Tensor vector, Tensor out, int8_t), { at::mv_out(out, self, vector); })
OP(aclnnDot, (Tensor self, Tensor other, Tensor out), { at::dot_out(out, self, other); })
OP(aclnnAddmm, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t), { at::addmm_out(out, self, a, b, beta, alpha); })
OP(aclnnInplaceAddmm, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, int8_t), { self.addmm_(a, b, beta, alpha); })
OP(aclnnAddbmm, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t), { at::addbmm_out(out, self, a, b, beta, alpha); })
OP(aclnnBaddbmm, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t), { at::baddbmm_out(out, self, a, b, beta, alpha); })
OP(aclnnInplaceBaddbmm, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, int8_t), { self.baddbmm_(a, b, beta, alpha); })
OP(aclnnAddmv, (Tensor self, Tensor matrix, Tensor vector, Scalar alpha, Scalar beta, Tensor out, int8_t), {
  at::addmv_out(out, self, matrix, vector, beta, alpha);
})
OP(aclnnAddr, (Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out), { at::addr_out(out, self, a, b, beta, alpha); })
