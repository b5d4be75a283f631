// Operators that order or look up values.
#include "core/shapes.h"

namespace {
emu::Shape largest_shape(const at::Tensor& self, int64_t k, int64_t dim) {
  dim = emu::real_dim(dim, self.dim());
  emu::within("k", k, int64_t{0}, self.dim() ? self.size(dim) : int64_t{1});
  emu::Shape shape(self.sizes());
  if (self.dim()) shape[dim] = k;
  return shape;
}
}  // namespace

SHAPED(aclnnSort, (Tensor self, bool stable, int64_t dim, bool descending, Tensor values, Tensor indices), (ALONG(values, self, dim), SAME(indices, self)), {
  const auto [value, index] = at::sort(self, stable, dim, descending);
  values.copy_(value);
  indices.copy_(index);
})
// The unnamed parameter is the sorting policy, which decides speed alone.
SHAPED(aclnnTopkV2, (Tensor self, int64_t k, int64_t dim, bool largest, bool sorted, int64_t, Tensor values, Tensor indices),
       (SHAPE(values, largest_shape(self, k, dim)), SAME(indices, values)), {
  const auto [value, index] = at::topk(self, k, dim, largest, sorted);
  values.copy_(value);
  indices.copy_(index);
})
OP(aclnnSearchSorted, (Tensor sequence, Tensor self, bool int32, bool right, Opt<Tensor> sorter, Tensor out), {
  at::searchsorted_out(out, sequence, self, int32, right, std::nullopt, sorter);
})
OP(aclnnSearchSorteds, (Tensor sequence, Scalar self, bool int32, bool right, Opt<Tensor> sorter, Tensor out), {
  out.copy_(at::searchsorted(sequence, self, int32, right, std::nullopt, sorter));
})
OP(aclnnBincount, (Tensor self, Opt<Tensor> weights, int64_t minlength, Tensor out), {
  out.copy_(at::bincount(self, weights, minlength));
})
OP(aclnnUnique2, (Tensor self, bool sorted, bool inverse, bool counts, Result values, Result inverses, Result numbers), {
  const auto [value, index, count] = at::_unique2(self, sorted, inverse, counts);
  values.assign(value);
  if (inverse) inverses.assign(index);
  if (counts) numbers.assign(count);
})
