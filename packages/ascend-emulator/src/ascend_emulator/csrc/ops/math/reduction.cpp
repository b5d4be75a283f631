// Operators that reduce or scan over dimensions.
#include "core/shapes.h"

namespace {
// ATen rounds each product of halves.
at::ScalarType in_float32(at::ScalarType dtype) { return at::isReducedFloatingType(dtype) ? at::kFloat : dtype; }
}  // namespace

SHAPED(aclnnReduceSum, (Tensor self, Ints dims, bool keepdim, DType dtype, Tensor out), REDUCED(out, self, dims, keepdim), {
  at::sum_out(out, self, dims, keepdim, dtype);
})
SHAPED(aclnnReduceNansum, (Tensor self, Ints dims, bool keepdim, DType dtype, Tensor out), REDUCED(out, self, dims, keepdim), {
  at::nansum_out(out, self, dims, keepdim, dtype);
})
SHAPED(aclnnMean, (Tensor self, Ints dims, bool keepdim, DType dtype, Tensor out), REDUCED(out, self, dims, keepdim), {
  at::mean_out(out, self, dims, keepdim, dtype);
})
SHAPED(aclnnProd, (Tensor self, DType dtype, Tensor out), SHAPE(out, {}), { out.copy_(at::prod(self, in_float32(dtype))); })
SHAPED(aclnnProdDim, (Tensor self, int64_t dim, bool keepdim, DType dtype, Tensor out), REDUCED(out, self, dim, keepdim), {
  out.copy_(at::prod(self, dim, keepdim, in_float32(dtype)));
})
SHAPED(aclnnAny, (Tensor self, Ints dims, bool keepdim, Tensor out), REDUCED(out, self, dims, keepdim), {
  out.copy_(at::any(self, at::OptionalIntArrayRef(dims), keepdim));
})
SHAPED(aclnnAll, (Tensor self, Ints dims, bool keepdim, Tensor out), REDUCED(out, self, dims, keepdim), {
  out.copy_(at::all(self, at::OptionalIntArrayRef(dims), keepdim));
})

SHAPED(aclnnMax, (Tensor self, Tensor out), SHAPE(out, {}), { out.copy_(at::max(self)); })
SHAPED(aclnnMin, (Tensor self, Tensor out), SHAPE(out, {}), { out.copy_(at::min(self)); })
SHAPED(aclnnAmax, (Tensor self, Ints dims, bool keepdim, Tensor out), REDUCED(out, self, dims, keepdim), { at::amax_out(out, self, dims, keepdim); })
SHAPED(aclnnAmin, (Tensor self, Ints dims, bool keepdim, Tensor out), REDUCED(out, self, dims, keepdim), { at::amin_out(out, self, dims, keepdim); })
SHAPED(aclnnArgMax, (Tensor self, int64_t dim, bool keepdim, Tensor out), REDUCED(out, self, dim, keepdim), {
  out.copy_(at::argmax(self, dim, keepdim));
})
SHAPED(aclnnArgMin, (Tensor self, int64_t dim, bool keepdim, Tensor out), REDUCED(out, self, dim, keepdim), {
  out.copy_(at::argmin(self, dim, keepdim));
})

// The NPU may hold the indices as int32.
SHAPED(aclnnMaxDim, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices), (REDUCED(values, self, dim, keepdim), SAME(indices, values)), {
  const auto [value, index] = at::max(self, dim, keepdim);
  values.copy_(value);
  indices.copy_(index);
})
SHAPED(aclnnMinDim, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices), (REDUCED(values, self, dim, keepdim), SAME(indices, values)), {
  const auto [value, index] = at::min(self, dim, keepdim);
  values.copy_(value);
  indices.copy_(index);
})
SHAPED(aclnnCummax, (Tensor self, int64_t dim, Tensor values, Tensor indices), (ALONG(values, self, dim), SAME(indices, self)), {
  const auto [value, index] = at::cummax(self, dim);
  values.copy_(value);
  indices.copy_(index);
})
SHAPED(aclnnCummin, (Tensor self, int64_t dim, Tensor values, Tensor indices), (ALONG(values, self, dim), SAME(indices, self)), {
  const auto [value, index] = at::cummin(self, dim);
  values.copy_(value);
  indices.copy_(index);
})
SHAPED(aclnnAminmax, (Tensor self, Ints dims, bool keepdim, Tensor min, Tensor max), (REDUCED(min, self, dims, keepdim), SAME(max, min)), {
  at::amin_out(min, self, dims, keepdim);
  at::amax_out(max, self, dims, keepdim);
})
SHAPED(aclnnMedian, (Tensor self, Tensor out), SHAPE(out, {}), { out.copy_(at::median(self)); })
SHAPED(aclnnTrace, (Tensor self, Tensor out), SHAPE(out, {}), { out.copy_(at::trace(self)); })
SHAPED(aclnnCumsum, (Tensor self, int64_t dim, DType dtype, Tensor out), ALONG(out, self, dim), { at::cumsum_out(out, self, dim, dtype); })
SHAPED(aclnnCumprod, (Tensor self, Scalar dim, DType dtype, Tensor out), ALONG(out, self, dim.toLong()), {
  at::cumprod_out(out, self, dim.toLong(), dtype);
})

SHAPED(aclnnVarCorrection, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor out), REDUCED(out, self, dims, keepdim), {
  at::var_out(out, self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim);
})
SHAPED(aclnnVarMean, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor var, Tensor mean), (REDUCED(var, self, dims, keepdim), SAME(mean, var)), {
  const auto [v, m] = at::var_mean(self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim);
  var.copy_(v);
  mean.copy_(m);
})
SHAPED(aclnnStd, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor out), REDUCED(out, self, dims, keepdim), {
  at::std_out(out, self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim);
})
SHAPED(aclnnStdMeanCorrection, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor std, Tensor mean), (REDUCED(std, self, dims, keepdim), SAME(mean, std)), {
  const auto [s, m] = at::std_mean(self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim);
  std.copy_(s);
  mean.copy_(m);
})
SHAPED(aclnnNorm, (Tensor self, Scalar p, Ints dims, bool keepdim, Tensor out), REDUCED(out, self, dims, keepdim), {
  at::norm_out(out, self, p, dims, keepdim);
})
SHAPED(aclnnLinalgVectorNorm, (Tensor self, Scalar order, Ints dims, bool keepdim, DType dtype, Tensor out), REDUCED(out, self, dims, keepdim), {
  out.copy_(at::linalg_vector_norm(self, order, at::OptionalIntArrayRef(dims), keepdim, dtype));
})
SHAPED(aclnnLogSumExp, (Tensor self, Ints dims, bool keepdim, Tensor out), REDUCED(out, self, dims, keepdim), {
  at::logsumexp_out(out, self, dims, keepdim);
})
