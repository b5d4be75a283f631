// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Reductions and scans.
#include "families.h"

namespace {
// ATen rounds each partial product of 16-bit types.
at::ScalarType in_float32(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}
}  // namespace

SHAPED(aclnnProd, (Tensor self, DType dtype, Tensor out), SHAPE(out, {}),
    { out.copy_(at::prod(self, in_float32(dtype))); })
SHAPED(aclnnProdDim, (Tensor self, int64_t dim, bool keepdim, DType dtype, Tensor out),
    REDUCED(out, self, dim, keepdim),
    { out.copy_(at::prod(self, dim, keepdim, in_float32(dtype))); })

SHAPED(aclnnAminmax, (Tensor self, Ints dims, bool keepdim, Tensor min, Tensor max),
    (REDUCED(min, self, dims, keepdim), SAME(max, min)), {
      at::amin_out(min, self, dims, keepdim);
      at::amax_out(max, self, dims, keepdim);
    })
SHAPED(aclnnCumsum, (Tensor self, int64_t dim, DType dtype, Tensor out), ALONG(out, self, dim),
    { at::cumsum_out(out, self, dim, dtype); })
SHAPED(aclnnCumprod, (Tensor self, Scalar dim, DType dtype, Tensor out),
    ALONG(out, self, dim.toLong()), { at::cumprod_out(out, self, dim.toLong(), dtype); })

SHAPED(aclnnNorm, (Tensor self, Scalar p, Ints dims, bool keepdim, Tensor out),
    REDUCED(out, self, dims, keepdim), { at::norm_out(out, self, p, dims, keepdim); })
SHAPED(aclnnLinalgVectorNorm,
    (Tensor self, Scalar order, Ints dims, bool keepdim, DType dtype, Tensor out),
    REDUCED(out, self, dims, keepdim), {
      out.copy_(at::linalg_vector_norm(self, order, at::OptionalIntArrayRef(dims), keepdim, dtype));
    })

OP(aclnnNanMedian, (Tensor self, Tensor out), { out.copy_(at::nanmedian(self)); })
OP(aclnnAminmaxAll, (Tensor self, Tensor min, Tensor max),
    { copy_both(at::aminmax(self), min, max); })
