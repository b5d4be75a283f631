// Further operators that look up, order, scatter or split.
#include "ops/wide.h"

namespace {
using namespace emu;

// torch_npu's order of reductions (op-plugin's ScatterReduceKernelNpuOpApi.cpp).
const char* reduction_name(int64_t reduction) {
  static const char* const names[] = {"none", "sum", "prod", "amax", "amin", "mean"};
  check(reduction > 0 && reduction < 6, kOpParam, "reduction ", reduction, "; 1 sum, 2 prod, 3 amax, 4 amin and 5 mean are there");
  return names[reduction];
}

void store(const std::tuple<Tensor, Tensor>& result, Tensor& values, Tensor& indices) {
  values.copy_(std::get<0>(result));
  indices.copy_(std::get<1>(result));
}

constexpr int64_t kNoDim = 1000;  // what op-plugin's UniqueConsecutiveKernelNpuOpApi.cpp passes for no dimension
}  // namespace

OP(aclnnKthvalue, (Tensor self, int64_t k, int64_t dim, bool keepdim, Tensor values, Tensor indices), { store(at::kthvalue(self, k, dim, keepdim), values, indices); })
OP(aclnnMedianDim, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices), { store(at::median(self, dim, keepdim), values, indices); })
OP(aclnnNanMedianDim, (Tensor self, int64_t dim, bool keepdim, Tensor values, Tensor indices), { store(at::nanmedian(self, dim, keepdim), values, indices); })
OP(aclnnNanMedian, (Tensor self, Tensor out), { out.copy_(at::nanmedian(self)); })
OP(aclnnAminmaxAll, (Tensor self, Tensor min, Tensor max), { store(at::aminmax(self), min, max); })
OP(aclnnAminmaxDim, (Tensor self, int64_t dim, bool keepdim, Tensor min, Tensor max), { store(at::aminmax(self, dim, keepdim), min, max); })
OP(aclnnTake, (Tensor self, Tensor indices, Tensor out), { out.copy_(at::take(self, index(indices))); })
OP(aclnnInplacePut, (Tensor self, Tensor indices, Tensor source, bool accumulate), { self.put_(index(indices), source, accumulate); })
// The unnamed parameter is a mode, 0 in torch_npu's calls.
OP(aclnnIndexAddV2, (Tensor self, int64_t dim, Tensor indices, Tensor source, Scalar alpha, int64_t, Tensor out), {
  out.copy_(at::index_add(wide(self), dim, index(indices), wide(source), alpha));
})
OP(aclnnScatterReduce, (Tensor self, int64_t dim, Tensor indices, Tensor source, int64_t reduction, bool include_self, Tensor out), {
  out.copy_(at::scatter_reduce(wide(self), dim, index(indices), wide(source), reduction_name(reduction), include_self));
})
OP(aclnnInplaceScatterReduce, (Tensor self, int64_t dim, Tensor indices, Tensor source, int64_t reduction, bool include_self), {
  self.copy_(at::scatter_reduce(wide(self), dim, index(indices), wide(source), reduction_name(reduction), include_self));
})
OP(aclnnChunkCat, (Tensors tensors, int64_t dim, int64_t chunks, Tensor out), { out.copy_(at::_chunk_cat(tensors, dim, chunks)); })
OP(aclnnEmbeddingRenorm, (Tensor self, Tensor indices, double bound, double order), { at::embedding_renorm_(self, index(indices), bound, order); })
OP(aclnnEmbeddingBag, (Tensor weight, Tensor indices, Tensor offsets, bool scale, int64_t mode, bool sparse, Opt<Tensor> per_sample, bool last, int64_t padding,
                       Tensor out, Tensor bags, Tensor sizes, Tensor maxima), {
  const auto [value, bag, size, maximum] =
      at::_embedding_bag(wide(weight), index(indices), index(offsets), scale, mode, sparse, wide(per_sample), last, padding);
  out.copy_(value);
  if (bags.numel() == bag.numel()) bags.copy_(bag);
  if (sizes.numel() == size.numel()) sizes.copy_(size);
  if (maxima.numel() == maximum.numel()) maxima.copy_(maximum);
})

OP(aclnnUnique, (Tensor self, bool sorted, bool inverse, Result values, Result inverses), {
  const auto [value, position] = at::_unique(self, sorted, inverse);
  values.assign(value);
  if (inverse) inverses.assign(position);
})
OP(aclnnUniqueDim, (Tensor self, bool sorted, bool inverse, int64_t dim, Result values, Result inverses, Result numbers), {
  const auto [value, position, count] = at::unique_dim(self, dim, sorted, inverse, true);
  values.assign(value);
  if (inverse) inverses.assign(position);
  numbers.assign(count);
})
OP(aclnnUniqueConsecutive, (Tensor self, bool inverse, bool counts, int64_t dim, Result values, Result inverses, Result numbers), {
  const auto [value, position, count] = at::unique_consecutive(self, inverse, counts, dim == kNoDim ? std::nullopt : Opt<int64_t>(dim));
  values.assign(value);
  if (inverse) inverses.assign(position);
  if (counts) numbers.assign(count);
})
OP(aclnnRepeatInterleaveTensor, (Tensor repeats, int64_t total, Tensor out), { out.copy_(at::repeat_interleave(index(repeats), Opt<int64_t>(total))); })
