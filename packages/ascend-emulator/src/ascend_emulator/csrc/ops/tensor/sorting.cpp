// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Sorting, top-k, unique and search.
#include "operator/shapes.h"
#include "ops/upcast.h"

namespace {
emu::Shape largest_shape(const at::Tensor& self, int64_t k, int64_t dim) {
  emu::rank("self", self, 1,
      8);  // torch_npu's documentation of torch.Tensor.topk: no tensor without dimensions
  dim = emu::real_dim(dim, self.dim());
  emu::within("k", k, int64_t{0}, self.size(dim));
  emu::Shape shape(self.sizes());
  shape[dim] = k;
  return shape;
}

constexpr int64_t kNoDim =
    1000;  // what op-plugin's UniqueConsecutiveKernelNpuOpApi.cpp passes for no dimension
}  // namespace

SHAPED(aclnnSort,
    (Tensor self, bool stable, int64_t dim, bool descending, Tensor values, Tensor indices),
    (ALONG(values, self, dim), SAME(indices, self)),
    { copy_both(at::sort(self, stable, dim, descending), values, indices); })
#define TOPK(NAME, ...)                                                                           \
  SHAPED(NAME,                                                                                    \
      (Tensor self, int64_t k, int64_t dim, bool largest, bool sorted, __VA_ARGS__ Tensor values, \
          Tensor indices),                                                                        \
      (SHAPE(values, largest_shape(self, k, dim)), SAME(indices, values)),                        \
      { copy_both(at::topk(self, k, dim, largest, sorted), values, indices); })
TOPK(aclnnTopk)
TOPK(aclnnTopkV2, int64_t, )  // the sorting policy, which affects speed only
OP(aclnnSearchSorted,
    (Tensor sequence, Tensor self, bool int32, bool right, Opt<Tensor> sorter, Tensor out),
    { at::searchsorted_out(out, sequence, self, int32, right, std::nullopt, sorter); })
OP(aclnnSearchSorteds,
    (Tensor sequence, Scalar self, bool int32, bool right, Opt<Tensor> sorter, Tensor out),
    { out.copy_(at::searchsorted(sequence, self, int32, right, std::nullopt, sorter)); })
SHAPED(aclnnBucketize, (Tensor self, Tensor boundaries, bool int32, bool right, Tensor out),
    (rank("boundaries", boundaries, 1), SAME(out, self)),
    { at::bucketize_out(out, self, boundaries, int32, right); })
OP_OF_VALUES(aclnnBincount, (Tensor self, Opt<Tensor> weights, int64_t minlength, Tensor out),
    { out.copy_(at::bincount(self, weights, minlength)); })
OP(aclnnUnique2,
    (Tensor self, bool sorted, bool inverse, bool counts, Result values, Result inverses,
        Result numbers),
    {
      const auto [value, index, count] = at::_unique2(self, sorted, inverse, counts);
      values.assign(value);
      if (inverse) inverses.assign(index);
      if (counts) numbers.assign(count);
    })

OP(aclnnKthvalue,
    (Tensor self, int64_t k, int64_t dim, bool keepdim, Tensor values, Tensor indices),
    { copy_both(at::kthvalue(self, k, dim, keepdim), values, indices); })
OP(aclnnUnique, (Tensor self, bool sorted, bool inverse, Result values, Result inverses), {
  const auto [value, position] = at::_unique(self, sorted, inverse);
  values.assign(value);
  if (inverse) inverses.assign(position);
})
OP(aclnnUniqueDim,
    (Tensor self, bool sorted, bool inverse, int64_t dim, Result values, Result inverses,
        Result numbers),
    {
      const auto [value, position, count] = at::unique_dim(self, dim, sorted, inverse, true);
      values.assign(value);
      if (inverse) inverses.assign(position);
      numbers.assign(count);
    })
OP(aclnnUniqueConsecutive,
    (Tensor self, bool inverse, bool counts, int64_t dim, Result values, Result inverses,
        Result numbers),
    {
      const auto [value, position, count] = at::unique_consecutive(
          self, inverse, counts, dim == kNoDim ? std::nullopt : Opt<int64_t>(dim));
      values.assign(value);
      if (inverse) inverses.assign(position);
      if (counts) numbers.assign(count);
    })
