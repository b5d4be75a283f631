// Operators that reduce or scan over dimensions.
#include "../core/op.h"

namespace {
// ATen rounds each product of halves.
at::ScalarType in_float32(at::ScalarType dtype) { return at::isReducedFloatingType(dtype) ? at::kFloat : dtype; }
}  // namespace

OP(aclnnReduceSum, (Tensor self, Ints dims, bool keepdim, DType dtype, Tensor out), { at::sum_out(out, self, dims, keepdim, dtype); })
OP(aclnnReduceNansum, (Tensor self, Ints dims, bool keepdim, DType dtype, Tensor out), { at::nansum_out(out, self, dims, keepdim, dtype); })
OP(aclnnMean, (Tensor self, Ints dims, bool keepdim, DType dtype, Tensor out), { at::mean_out(out, self, dims, keepdim, dtype); })
OP(aclnnProd, (Tensor self, DType dtype, Tensor out), { out.copy_(at::prod(self, in_float32(dtype))); })
OP(aclnnProdDim, (Tensor self, int64_t dim, bool keepdim, DType dtype, Tensor out), { out.copy_(at::prod(self, dim, keepdim, in_float32(dtype))); })
OP(aclnnAny, (Tensor self, Ints dims, bool keepdim, Tensor out), { out.copy_(at::any(self, at::OptionalIntArrayRef(dims), keepdim)); })
OP(aclnnAll, (Tensor self, Ints dims, bool keepdim, Tensor out), { out.copy_(at::all(self, at::OptionalIntArrayRef(dims), keepdim)); })

OP(aclnnMax, (Tensor self, Tensor out), { out.copy_(at::max(self)); })
OP(aclnnMin, (Tensor self, Tensor out), { out.copy_(at::min(self)); })
OP(aclnnAmax, (Tensor self, Ints dims, bool keepdim, Tensor out), { at::amax_out(out, self, dims, keepdim); })
OP(aclnnAmin, (Tensor self, Ints dims, bool keepdim, Tensor out), { at::amin_out(out, self, dims, keepdim); })
OP(aclnnArgMax, (Tensor self, int64_t dim, bool keepdim, Tensor out), { out.copy_(at::argmax(self, dim, keepdim)); })
OP(aclnnArgMin, (Tensor self, int64_t dim, bool keepdim, Tensor out), { out.copy_(at::argmin(self, dim, keepdim)); })

// The NPU may hold the indices as int32.
OP(aclnnMaxDim, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices), {
  const auto [value, index] = at::max(self, dim, keepdim);
  values.copy_(value);
  indices.copy_(index);
})
OP(aclnnMinDim, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices), {
  const auto [value, index] = at::min(self, dim, keepdim);
  values.copy_(value);
  indices.copy_(index);
})
OP(aclnnCummax, (Tensor self, int64_t dim, Tensor values, Tensor indices), {
  const auto [value, index] = at::cummax(self, dim);
  values.copy_(value);
  indices.copy_(index);
})
OP(aclnnCummin, (Tensor self, int64_t dim, Tensor values, Tensor indices), {
  const auto [value, index] = at::cummin(self, dim);
  values.copy_(value);
  indices.copy_(index);
})
OP(aclnnAminmax, (Tensor self, Ints dims, bool keepdim, Tensor min, Tensor max), {
  at::amin_out(min, self, dims, keepdim);
  at::amax_out(max, self, dims, keepdim);
})
OP(aclnnMedian, (Tensor self, Tensor out), { out.copy_(at::median(self)); })
OP(aclnnTrace, (Tensor self, Tensor out), { out.copy_(at::trace(self)); })
OP(aclnnCumsum, (Tensor self, int64_t dim, DType dtype, Tensor out), { at::cumsum_out(out, self, dim, dtype); })
OP(aclnnCumprod, (Tensor self, Scalar dim, DType dtype, Tensor out), { at::cumprod_out(out, self, dim.toLong(), dtype); })

OP(aclnnVarCorrection, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor out), {
  at::var_out(out, self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim);
})
OP(aclnnVarMean, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor var, Tensor mean), {
  const auto [v, m] = at::var_mean(self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim);
  var.copy_(v);
  mean.copy_(m);
})
OP(aclnnStd, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor out), {
  at::std_out(out, self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim);
})
OP(aclnnStdMeanCorrection, (Tensor self, Ints dims, int64_t correction, bool keepdim, Tensor std, Tensor mean), {
  const auto [s, m] = at::std_mean(self, at::OptionalIntArrayRef(dims), Scalar(correction), keepdim);
  std.copy_(s);
  mean.copy_(m);
})
OP(aclnnNorm, (Tensor self, Scalar p, Ints dims, bool keepdim, Tensor out), { at::norm_out(out, self, p, dims, keepdim); })
OP(aclnnLinalgVectorNorm, (Tensor self, Scalar order, Ints dims, bool keepdim, DType dtype, Tensor out), {
  out.copy_(at::linalg_vector_norm(self, order, at::OptionalIntArrayRef(dims), keepdim, dtype));
})
OP(aclnnLogSumExp, (Tensor self, Ints dims, bool keepdim, Tensor out), { at::logsumexp_out(out, self, dims, keepdim); })
