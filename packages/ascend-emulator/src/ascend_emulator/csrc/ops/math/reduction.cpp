// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Reductions and scans.
#include "operator/shapes.h"
#include "ops/upcast.h"

namespace {
// ATen rounds each partial product of 16-bit types.
at::ScalarType in_float32(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}
// ATen's any and all reduce nothing where no dimension is given.
at::OptionalIntArrayRef all_if_none(const emu::Ints& dims) {
  return dims.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims);
}
}  // namespace

SHAPED(aclnnReduceSum, (Tensor self, Ints dims, bool keepdim, DType dtype, Tensor out),
    REDUCED(out, self, dims, keepdim), { at::sum_out(out, self, dims, keepdim, dtype); })
SHAPED(aclnnReduceNansum, (Tensor self, Ints dims, bool keepdim, DType dtype, Tensor out),
    REDUCED(out, self, dims, keepdim), { at::nansum_out(out, self, dims, keepdim, dtype); })
SHAPED(aclnnMean, (Tensor self, Ints dims, bool keepdim, DType dtype, Tensor out),
    REDUCED(out, self, dims, keepdim), { at::mean_out(out, self, dims, keepdim, dtype); })
SHAPED(aclnnProd, (Tensor self, DType dtype, Tensor out), SHAPE(out, {}),
    { out.copy_(at::prod(self, in_float32(dtype))); })
SHAPED(aclnnProdDim, (Tensor self, int64_t dim, bool keepdim, DType dtype, Tensor out),
    REDUCED(out, self, dim, keepdim),
    { out.copy_(at::prod(self, dim, keepdim, in_float32(dtype))); })
SHAPED(aclnnAny, (Tensor self, Ints dims, bool keepdim, Tensor out),
    REDUCED(out, self, dims, keepdim), { out.copy_(at::any(self, all_if_none(dims), keepdim)); })
SHAPED(aclnnAll, (Tensor self, Ints dims, bool keepdim, Tensor out),
    REDUCED(out, self, dims, keepdim), { out.copy_(at::all(self, all_if_none(dims), keepdim)); })

SHAPED(aclnnMax, (Tensor self, Tensor out), SHAPE(out, {}), { out.copy_(at::max(self)); })
SHAPED(aclnnMin, (Tensor self, Tensor out), SHAPE(out, {}), { out.copy_(at::min(self)); })
SHAPED(aclnnAmax, (Tensor self, Ints dims, bool keepdim, Tensor out),
    REDUCED(out, self, dims, keepdim), { at::amax_out(out, self, dims, keepdim); })
SHAPED(aclnnAmin, (Tensor self, Ints dims, bool keepdim, Tensor out),
    REDUCED(out, self, dims, keepdim), { at::amin_out(out, self, dims, keepdim); })
SHAPED(aclnnArgMax, (Tensor self, int64_t dim, bool keepdim, Tensor out),
    REDUCED(out, self, dim, keepdim), { out.copy_(at::argmax(self, dim, keepdim)); })
SHAPED(aclnnArgMin, (Tensor self, int64_t dim, bool keepdim, Tensor out),
    REDUCED(out, self, dim, keepdim), { out.copy_(at::argmin(self, dim, keepdim)); })

// Indices may be int32.
SHAPED(aclnnMaxDim, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices),
    (REDUCED(values, self, dim, keepdim), SAME(indices, values)),
    { copy_both(at::max(self, dim, keepdim), values, indices); })
SHAPED(aclnnMinDim, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices),
    (REDUCED(values, self, dim, keepdim), SAME(indices, values)),
    { copy_both(at::min(self, dim, keepdim), values, indices); })
SHAPED(aclnnCummax, (Tensor self, int64_t dim, Tensor values, Tensor indices),
    (ALONG(values, self, dim), SAME(indices, self)),
    { copy_both(at::cummax(self, dim), values, indices); })
SHAPED(aclnnCummin, (Tensor self, int64_t dim, Tensor values, Tensor indices),
    (ALONG(values, self, dim), SAME(indices, self)),
    { copy_both(at::cummin(self, dim), values, indices); })
SHAPED(aclnnAminmax, (Tensor self, Ints dims, bool keepdim, Tensor min, Tensor max),
    (REDUCED(min, self, dims, keepdim), SAME(max, min)), {
      at::amin_out(min, self, dims, keepdim);
      at::amax_out(max, self, dims, keepdim);
    })
SHAPED(aclnnMedian, (Tensor self, Tensor out), SHAPE(out, {}), { out.copy_(at::median(self)); })
SHAPED(aclnnTrace, (Tensor self, Tensor out), SHAPE(out, {}), { out.copy_(at::trace(self)); })
SHAPED(aclnnCumsum, (Tensor self, int64_t dim, DType dtype, Tensor out), ALONG(out, self, dim),
    { at::cumsum_out(out, self, dim, dtype); })
SHAPED(aclnnCumprod, (Tensor self, Scalar dim, DType dtype, Tensor out),
    ALONG(out, self, dim.toLong()), { at::cumprod_out(out, self, dim.toLong(), dtype); })

SHAPED(aclnnVarCorrection, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor out),
    REDUCED(out, self, dims, keepdim),
    { at::var_out(out, self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim); })
SHAPED(aclnnVarMean,
    (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor var, Tensor mean),
    (REDUCED(var, self, dims, keepdim), SAME(mean, var)), {
      copy_both(at::var_mean(self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim), var,
          mean);
    })
SHAPED(aclnnStd, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor out),
    REDUCED(out, self, dims, keepdim),
    { at::std_out(out, self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim); })
SHAPED(aclnnStdMeanCorrection,
    (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor std, Tensor mean),
    (REDUCED(std, self, dims, keepdim), SAME(mean, std)), {
      copy_both(at::std_mean(self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim), std,
          mean);
    })
SHAPED(aclnnNorm, (Tensor self, Scalar p, Ints dims, bool keepdim, Tensor out),
    REDUCED(out, self, dims, keepdim), { at::norm_out(out, self, p, dims, keepdim); })
SHAPED(aclnnLinalgVectorNorm,
    (Tensor self, Scalar order, Ints dims, bool keepdim, DType dtype, Tensor out),
    REDUCED(out, self, dims, keepdim), {
      out.copy_(at::linalg_vector_norm(self, order, at::OptionalIntArrayRef(dims), keepdim, dtype));
    })
SHAPED(aclnnLogSumExp, (Tensor self, Ints dims, bool keepdim, Tensor out),
    REDUCED(out, self, dims, keepdim), { at::logsumexp_out(out, self, dims, keepdim); })

OP(aclnnMedianDim, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices),
    { copy_both(at::median(self, dim, keepdim), values, indices); })
OP(aclnnNanMedianDim, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices),
    { copy_both(at::nanmedian(self, dim, keepdim), values, indices); })
OP(aclnnNanMedian, (Tensor self, Tensor out), { out.copy_(at::nanmedian(self)); })
OP(aclnnAminmaxAll, (Tensor self, Tensor min, Tensor max),
    { copy_both(at::aminmax(self), min, max); })
OP(aclnnAminmaxDim, (Tensor self, int64_t dim, bool keepdim, Tensor min, Tensor max),
    { copy_both(at::aminmax(self, dim, keepdim), min, max); })
