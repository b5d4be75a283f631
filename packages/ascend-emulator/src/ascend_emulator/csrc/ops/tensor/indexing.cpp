// Operators that read or write at indices.
#include "core/cost.h"
#include "operator/shapes.h"
#include "ops/wide.h"

namespace {

// torch_npu passes an empty tensor where a dimension is not indexed; where all are empty, none of an index's values are (it
// spreads indices over one another beforehand), and no list is returned.
std::optional<c10::List<std::optional<at::Tensor>>> index_list(const emu::Tensors& indices) {
  c10::List<std::optional<at::Tensor>> out;
  bool some = false;
  for (const auto& index : indices) {
    const bool used = index.defined() && index.numel();
    out.push_back(used ? std::optional<at::Tensor>(index) : std::nullopt);
    some |= used;
  }
  return some ? std::optional(out) : std::nullopt;
}

// 0 none, 1 add, 2 multiply (op-plugin's ScatterKernelNpuOpApi.cpp).
template <class Source>
void scatter(
    at::Tensor& out, const at::Tensor& self, int64_t dim, const at::Tensor& index, const Source& source, int64_t reduction) {
  if (reduction == 0) {
    at::scatter_out(out, self, dim, emu::to_int64(index), source);
  } else {
    emu::check(
        reduction == 1 || reduction == 2, emu::kOpParam, "reduction ", reduction, "; 0 none, 1 add and 2 multiply are there");
    at::scatter_out(out, self, dim, emu::to_int64(index), source, reduction == 1 ? "add" : "multiply");
  }
}

// A tensor that goes with self's dimensions, none of its sizes above self's but for `dim`.
void inside(const char* argument, const at::Tensor& index, int64_t dim, const at::Tensor& self) {
  const auto least = std::max<int64_t>(self.dim(), 1);
  dim = emu::real_dim(dim, self.dim());
  bool fits = index.numel() == 0 || std::max<int64_t>(index.dim(), 1) == least;
  for (int64_t i = 0; fits && index.numel() && i < std::min(index.dim(), self.dim()); ++i)
    fits = i == dim || index.size(i) <= self.size(i);
  emu::check(fits, emu::kOpParam, argument, " has shape ", index.sizes(), "; allowed: sizes up to ", self.sizes(),
      ", but for dimension ", dim);
}

emu::Shape looked_up(const at::Tensor& weight, const at::Tensor& indices) {
  emu::rank("weight", weight, 2);
  emu::one_of("indices", indices, emu::kIndices);
  emu::Shape shape(indices.sizes());
  shape.push_back(weight.size(1));
  return shape;
}

emu::Shape selected(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  emu::rank("index", index, 0, 1);
  emu::one_of("index", index, emu::kIndices);
  dim = emu::real_dim(dim, self.dim());
  emu::Shape shape(self.sizes());
  if (self.dim()) shape[dim] = index.numel();
  return shape;
}

// torch_npu's order of reductions (op-plugin's ScatterReduceKernelNpuOpApi.cpp).
const char* reduction_name(int64_t reduction) {
  static const char* const names[] = {"none", "sum", "prod", "amax", "amin", "mean"};
  emu::check(reduction > 0 && reduction < 6, emu::kOpParam, "reduction ", reduction,
      "; 1 sum, 2 prod, 3 amax, 4 amin and 5 mean are there");
  return names[reduction];
}

}  // namespace

SHAPED(aclnnEmbedding, (Tensor weight, Tensor indices, Tensor out), SHAPE(out, looked_up(weight, indices)), {
  cost::touches(weight, out);
  at::embedding_out(out, weight, indices);
})
SHAPED(aclnnIndexSelect, (Tensor self, int64_t dim, Tensor index, Tensor out), SHAPE(out, selected(self, dim, index)), {
  cost::touches(self, out);
  at::index_select_out(out, self, dim, index);
})
OP(aclnnIndex, (Tensor self, Tensors indices, Tensor out), {
  if (!out.numel()) return;  // as of x[False], whose index is empty because it selects nothing
  cost::touches(self, out);
  if (const auto list = index_list(indices)) at::index_out(out, self, *list);
})
OP(aclnnIndexPutImpl, (Tensor self, Tensors indices, Tensor values, bool accumulate, bool), {
  cost::touches(self, values);
  if (const auto list = index_list(indices)) at::_index_put_impl_(self, *list, values, accumulate, false);
})
SHAPED(aclnnIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out), ALONG(out, self, dim),
    { at::index_copy_out(out, self, dim, to_int64(index), source); })
SHAPED(aclnnInplaceIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source), real_dim(dim, self.dim()), {
  cost::touches(self, source);
  self.index_copy_(dim, to_int64(index), source);
})
SHAPED(aclnnIndexAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Scalar alpha, Tensor out), ALONG(out, self, dim),
    { at::index_add_out(out, self, dim, index, source, alpha); })
SHAPED(aclnnIndexFill, (Tensor self, int64_t dim, Tensor index, Scalar value, Tensor out), ALONG(out, self, dim),
    { out.copy_(at::index_fill(self, dim, to_int64(index), value)); })
SHAPED(aclnnInplaceIndexFill, (Tensor self, int64_t dim, Tensor index, Scalar value), real_dim(dim, self.dim()),
    { self.index_fill_(dim, to_int64(index), value); })
SHAPED(aclnnGather, (Tensor self, int64_t dim, Tensor index, Tensor out), (inside("index", index, dim, self), SAME(out, index)), {
  cost::touches(self, out);
  at::gather_out(out, self, dim, to_int64(index));
})
SHAPED(aclnnScatter, (Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduction, Tensor out),
    (inside("index", index, dim, self), SAME(out, self)), { scatter(out, self, dim, index, source, reduction); })
SHAPED(aclnnScatterValue, (Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduction, Tensor out),
    (inside("index", index, dim, self), SAME(out, self)), { scatter(out, self, dim, index, value, reduction); })
SHAPED(aclnnInplaceScatter, (Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduction),
    inside("index", index, dim, self), { scatter(self, self, dim, index, source, reduction); })
SHAPED(aclnnInplaceScatterValue, (Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduction),
    inside("index", index, dim, self), { scatter(self, self, dim, index, value, reduction); })
SHAPED(aclnnScatterAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out),
    (inside("index", index, dim, self), SAME(out, self)), { at::scatter_add_out(out, self, dim, to_int64(index), source); })
// Rows of `indices` (its last dimension) address leading dimensions of self; `updates` holds one slice a row.
OP(aclnnScatterNdUpdate, (Tensor self, Tensor indices, Tensor updates), {
  cost::touches(self, updates);
  c10::List<std::optional<at::Tensor>> at_dims;
  for (const auto& column : to_int64(indices).unbind(-1)) at_dims.push_back(column);
  self.index_put_(at_dims, updates);
})

SHAPED(aclnnInplaceMaskedFillScalar, (Tensor self, Tensor mask, Scalar value), EXPANDS(self, mask),
    { self.masked_fill_(mask, value); })
SHAPED(aclnnInplaceMaskedFillTensor, (Tensor self, Tensor mask, Tensor value), EXPANDS(self, mask),
    { self.masked_fill_(mask, value); })
SHAPED(aclnnInplaceMaskedScatter, (Tensor self, Tensor mask, Tensor source), EXPANDS(self, mask),
    { self.masked_scatter_(mask, source); })
OP(aclnnMaskedSelect, (Tensor self, Tensor mask, Result out), { out.assign(at::masked_select(self, mask)); })
OP(aclnnNonzero, (Tensor self, Result out), { out.assign(at::nonzero(self)); })
// The V2 form has one row a dimension.
OP(aclnnNonzeroV2, (Tensor self, Result out), { out.assign(at::nonzero(self).t().contiguous()); })

// What npu_gather_sparse_index calls: rows of self by an index of any shape.
CHECKED(aclnnGatherV3, (Tensor self, int64_t dim, Tensor index, int64_t batch_dims, int64_t, Tensor out), {
  one_of("batch_dims", batch_dims, {int64_t{0}});
  one_of("index", index, kIndices);
  COMPUTE {
    cost::touches(self, out);
    auto sizes = self.sizes().vec();
    sizes.erase(sizes.begin() + dim);
    sizes.insert(sizes.begin() + dim, index.sizes().begin(), index.sizes().end());
    out.copy_(self.index_select(dim, index.reshape({-1}).to(at::kLong)).view(sizes));
  };
})
// For each entry of the first dimension, where its updates start along the axis (torch_npu's documentation of scatter_update).
CHECKED(aclnnInplaceScatterUpdate, (Tensor self, Tensor indices, Tensor updates, int64_t axis), {
  one_of("data", self, {at::kChar, at::kHalf, at::kFloat, at::kBFloat16, at::kInt});
  one_of("indices", indices, kIndices);
  rank("data", self, 2, 8);
  rank("indices", indices, 1);  // two dimensions are there too, but what the second means is not documented
  same_dtype("updates", updates, "data", self);
  rank("updates", updates, self.dim());
  const auto dim = real_dim(axis, self.dim(), "axis");
  check(dim > 0, kOpParam, "axis is 0, which the indices go along");
  shape("indices", indices, {updates.size(0)});
  COMPUTE {
    cost::touches(self, updates);
    for (int64_t i = 0; i < indices.numel(); ++i)
      self[i].narrow(dim - 1, indices[i].item<int64_t>(), updates.size(dim)).copy_(updates[i]);
  };
})

OP(aclnnTake, (Tensor self, Tensor indices, Tensor out), { out.copy_(at::take(self, to_int64(indices))); })
OP(aclnnInplacePut, (Tensor self, Tensor indices, Tensor source, bool accumulate),
    { self.put_(to_int64(indices), source, accumulate); })
// The unnamed parameter is a mode, 0 in torch_npu's calls.
OP(aclnnIndexAddV2, (Tensor self, int64_t dim, Tensor indices, Tensor source, Scalar alpha, int64_t, Tensor out),
    { out.copy_(at::index_add(wide(self), dim, to_int64(indices), wide(source), alpha)); })
OP(aclnnScatterReduce,
    (Tensor self, int64_t dim, Tensor indices, Tensor source, int64_t reduction, bool include_self, Tensor out),
    { out.copy_(at::scatter_reduce(wide(self), dim, to_int64(indices), wide(source), reduction_name(reduction), include_self)); })
OP(aclnnInplaceScatterReduce, (Tensor self, int64_t dim, Tensor indices, Tensor source, int64_t reduction, bool include_self), {
  self.copy_(at::scatter_reduce(wide(self), dim, to_int64(indices), wide(source), reduction_name(reduction), include_self));
})
OP(aclnnEmbeddingRenorm, (Tensor self, Tensor indices, double bound, double order),
    { at::embedding_renorm_(self, to_int64(indices), bound, order); })
OP(aclnnEmbeddingBag,
    (Tensor weight, Tensor indices, Tensor offsets, bool scale, int64_t mode, bool sparse, Opt<Tensor> per_sample, bool last,
        int64_t padding, Tensor out, Tensor bags, Tensor sizes, Tensor maxima),
    {
      const auto [value, bag, size, maximum] = at::_embedding_bag(
          wide(weight), to_int64(indices), to_int64(offsets), scale, mode, sparse, wide(per_sample), last, padding);
      out.copy_(value);
      if (bags.numel() == bag.numel()) bags.copy_(bag);
      if (sizes.numel() == size.numel()) sizes.copy_(size);
      if (maxima.numel() == maximum.numel()) maxima.copy_(maximum);
    })
OP(aclnnEmbeddingDenseBackward, (Tensor grad, Tensor indices, int64_t rows, int64_t padding, bool scale, Tensor out),
    { out.copy_(at::embedding_dense_backward(wide(grad), to_int64(indices), rows, padding, scale)); })
