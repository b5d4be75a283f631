// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Indexing, gather, scatter and embedding.
#include <ATen/core/List.h>

#include "core/cost.h"
#include "operator/shapes.h"
#include "ops/upcast.h"

namespace {

// torch_npu passes empty tensors for dimensions without an index. Returns nullopt if all are empty:
// torch_npu broadcasts indices beforehand, so nothing is indexed.
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
template <class Source> void scatter(at::Tensor& out, const at::Tensor& self, int64_t dim,
    const at::Tensor& index, const Source& source, int64_t reduction) {
  if (reduction == 0) {
    at::scatter_out(out, self, dim, emu::to_int64(index), source);
  } else {
    emu::require(reduction == 1 || reduction == 2, "reduction ", reduction,
        "; supported: 0 none, 1 add and 2 multiply");
    at::scatter_out(
        out, self, dim, emu::to_int64(index), source, reduction == 1 ? "add" : "multiply");
  }
}

// The documents of torch_npu refuse indices outside of self, or do not check them; a negative one
// does not count from the end.
void inside_rows(const char* argument, const at::Tensor& indices, int64_t limit) {
  if (!indices.numel()) return;
  const auto least = indices.min().item<int64_t>(), most = indices.max().item<int64_t>();
  emu::require(least >= 0 && most < limit, argument, " has values from ", least, " to ", most,
      "; allowed: 0 to ", limit - 1);
}

// Checks that no size of the index is above self's, except in `dim`.
void inside(const char* argument, const at::Tensor& index, int64_t dim, const at::Tensor& self) {
  const auto least = std::max<int64_t>(self.dim(), 1);
  dim = emu::real_dim(dim, self.dim());
  bool fits = index.numel() == 0 || std::max<int64_t>(index.dim(), 1) == least;
  for (int64_t i = 0; fits && index.numel() && i < std::min(index.dim(), self.dim()); ++i)
    fits = i == dim || index.size(i) <= self.size(i);
  emu::require(fits, argument, " has shape ", index.sizes(), "; allowed: sizes up to ",
      self.sizes(), ", except in dimension ", dim);
}

emu::Shape embedding_shape(const at::Tensor& weight, const at::Tensor& indices) {
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
  emu::require(reduction > 0 && reduction < 6, "reduction ", reduction,
      "; supported: 1 sum, 2 prod, 3 amax, 4 amin and 5 mean");
  return names[reduction];
}

}  // namespace

SHAPED(aclnnEmbedding, (Tensor weight, Tensor indices, Tensor out),
    SHAPE(out, embedding_shape(weight, indices)), {
      cost::partial_access(weight, out);
      with_index(
          "indices", indices, weight.size(0), [&] { at::embedding_out(out, weight, indices); });
    })
SHAPED(aclnnIndexSelect, (Tensor self, int64_t dim, Tensor index, Tensor out),
    SHAPE(out, selected(self, dim, index)), {
      cost::partial_access(self, out);
      with_index("index", index, self.dim() ? self.size(dim) : 1,
          [&] { at::index_select_out(out, self, dim, index); });
    })
OP(aclnnIndex, (Tensor self, Tensors indices, Tensor out), {
  if (!out.numel()) return;  // x[False] has an empty index
  cost::partial_access(self, out);
  if (const auto list = index_list(indices)) at::index_out(out, self, *list);
})
OP(aclnnIndexPutImpl, (Tensor self, Tensors indices, Tensor values, bool accumulate, bool), {
  rule("index_put.ai-cpu", [&] {
    check(!is_chip("Ascend310P") || self.scalar_type() != at::kHalf, Status(507018),
        "the AI CPU's kernel IndexPut fails on ", chip().name, " for ", at::kHalf);
  });
  cost::partial_access(self, values);
  if (const auto list = index_list(indices))
    at::_index_put_impl_(self, *list, values, accumulate, false);
})
SHAPED(aclnnIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out),
    ALONG(out, self, dim), { at::index_copy_out(out, self, dim, to_int64(index), source); })
SHAPED(aclnnInplaceIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source),
    real_dim(dim, self.dim()), {
      cost::partial_access(self, source);
      self.index_copy_(dim, to_int64(index), source);
    })
SHAPED(aclnnIndexAdd,
    (Tensor self, int64_t dim, Tensor index, Tensor source, Scalar alpha, Tensor out),
    ALONG(out, self, dim), { at::index_add_out(out, self, dim, index, source, alpha); })
SHAPED(aclnnIndexFill, (Tensor self, int64_t dim, Tensor index, Scalar value, Tensor out),
    ALONG(out, self, dim), { out.copy_(at::index_fill(self, dim, to_int64(index), value)); })
SHAPED(aclnnInplaceIndexFill, (Tensor self, int64_t dim, Tensor index, Scalar value),
    real_dim(dim, self.dim()), { self.index_fill_(dim, to_int64(index), value); })
// Indices on the host.
SHAPED(aclnnIndexFillTensor, (Tensor self, int64_t dim, Ints index, Scalar value, Tensor out),
    ALONG(out, self, dim),
    { out.copy_(at::index_fill(self, dim, at::tensor(index, at::kLong), value)); })
SHAPED(aclnnInplaceIndexFillTensor, (Tensor self, int64_t dim, Ints index, Scalar value),
    real_dim(dim, self.dim()), { self.index_fill_(dim, at::tensor(index, at::kLong), value); })
// torch_npu's documentation of torch.gather: as many dimensions of the index as of self;
// op-plugin's own tests have a scalar for a tensor of one dimension (test_gather backward.py). A3
// refuses gather's samples in PyTorch's tests, of which one has an empty uint8 index
// (Ascend/pytorch, ci-test, disabled_testcases.json: aclnnGather).
SHAPED(aclnnGather, (Tensor self, int64_t dim, Tensor index, Tensor out),
    (inside("index", index, dim, self),
        rank("index", index, self.dim() > 1 ? self.dim() : 0, std::max<int64_t>(self.dim(), 1)),
        one_of("index", index, kIndices), SAME(out, index)),
    {
      cost::partial_access(self, out);
      at::gather_out(out, self, dim, to_int64(index));
    })
#define SCATTER(NAME, TYPE)                                                                 \
  SHAPED(aclnn##NAME,                                                                       \
      (Tensor self, int64_t dim, Tensor index, TYPE source, int64_t reduction, Tensor out), \
      (inside("index", index, dim, self), SAME(out, self)),                                 \
      { scatter(out, self, dim, index, source, reduction); })                               \
  SHAPED(aclnnInplace##NAME,                                                                \
      (Tensor self, int64_t dim, Tensor index, TYPE source, int64_t reduction),             \
      inside("index", index, dim, self), { scatter(self, self, dim, index, source, reduction); })
SCATTER(Scatter, Tensor)
SCATTER(ScatterValue, Scalar)
SHAPED(aclnnScatterAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out),
    (inside("index", index, dim, self), SAME(out, self)),
    { at::scatter_add_out(out, self, dim, to_int64(index), source); })
// Rows of `indices` (its last dimension) address leading dimensions of self; `updates` has one
// slice per row.
CHECKED(aclnnScatterNdUpdate, (Tensor self, Tensor indices, Tensor updates), {
  rule("scatter_nd_update.columns",
      [&] { within("the last dimension of indices", indices.size(-1), int64_t{1}, self.dim()); });
  Shape sizes(indices.sizes().slice(0, indices.dim() - 1));
  const auto slice = self.sizes().slice(indices.size(-1));
  sizes.insert(sizes.end(), slice.begin(), slice.end());
  rule("scatter_nd_update.updates-shape", [&] { SHAPE(updates, sizes); });
  COMPUTE {
    cost::partial_access(self, updates);
    c10::List<std::optional<at::Tensor>> at_dims;
    for (const auto& column : to_int64(indices).unbind(-1)) {
      rule("scatter_nd_update.range",
          [&] { inside_rows("indices", column, self.size(static_cast<int64_t>(at_dims.size()))); });
      at_dims.push_back(column);
    }
    self.index_put_(at_dims, updates);
  };
})

SHAPED(aclnnInplaceMaskedFillScalar, (Tensor self, Tensor mask, Scalar value), EXPANDS(self, mask),
    { self.masked_fill_(mask, value); })
SHAPED(aclnnInplaceMaskedFillTensor, (Tensor self, Tensor mask, Tensor value), EXPANDS(self, mask),
    { self.masked_fill_(mask, value); })
SHAPED(aclnnInplaceMaskedScatter, (Tensor self, Tensor mask, Tensor source), EXPANDS(self, mask),
    { self.masked_scatter_(mask, source); })
OP(aclnnMaskedSelect, (Tensor self, Tensor mask, Result out),
    { out.assign(at::masked_select(self, mask)); })
OP(aclnnNonzero, (Tensor self, Result out), { out.assign(at::nonzero(self)); })
// V2 returns one row per dimension.
OP(aclnnNonzeroV2, (Tensor self, Result out), { out.assign(at::nonzero(self).t().contiguous()); })

// Called by npu_gather_sparse_index: rows of self by an index of any shape.
CHECKED(aclnnGatherV3,
    (Tensor self, int64_t dim, Tensor index, int64_t batch_dims, int64_t, Tensor out), {
      dim = real_dim(dim, self.dim());
      Shape sizes(self.sizes());
      sizes.erase(sizes.begin() + dim);
      sizes.insert(sizes.begin() + dim, index.sizes().begin(), index.sizes().end());
      SHAPE(out, sizes);
      COMPUTE {
        cost::partial_access(self, out);
        with_index("index", index, self.size(dim), [&] {
          out.copy_(self.index_select(dim, index.reshape({-1}).to(at::kLong)).view(sizes));
        });
      };
    })
// Start index of the updates along the axis, per entry of the first dimension (torch_npu's
// documentation of scatter_update).
CHECKED(aclnnInplaceScatterUpdate, (Tensor self, Tensor indices, Tensor updates, int64_t axis), {
  const auto dim = real_dim(axis, self.dim(), "axis");
  require(dim > 0, "axis is 0, which the indices go along");
  COMPUTE {
    cost::partial_access(self, updates);
    inside_rows("indices", indices, self.size(dim) - updates.size(dim) + 1);
    for (int64_t i = 0; i < indices.numel(); ++i)
      self[i].narrow(dim - 1, indices[i].item<int64_t>(), updates.size(dim)).copy_(updates[i]);
  };
})

OP(aclnnTake, (Tensor self, Tensor indices, Tensor out),
    { out.copy_(at::take(self, to_int64(indices))); })
OP(aclnnInplacePut, (Tensor self, Tensor indices, Tensor source, bool accumulate),
    { self.put_(to_int64(indices), source, accumulate); })
// The unnamed parameter is a mode; torch_npu passes 0.
OP(aclnnIndexAddV2,
    (Tensor self, int64_t dim, Tensor indices, Tensor source, Scalar alpha, int64_t, Tensor out),
    { out.copy_(at::index_add(upcast(self), dim, to_int64(indices), upcast(source), alpha)); })
OP(aclnnScatterReduce,
    (Tensor self, int64_t dim, Tensor indices, Tensor source, int64_t reduction, bool include_self,
        Tensor out),
    {
      out.copy_(at::scatter_reduce(upcast(self), dim, to_int64(indices), upcast(source),
          reduction_name(reduction), include_self));
    })
OP(aclnnInplaceScatterReduce,
    (Tensor self, int64_t dim, Tensor indices, Tensor source, int64_t reduction, bool include_self),
    {
      self.copy_(at::scatter_reduce(upcast(self), dim, to_int64(indices), upcast(source),
          reduction_name(reduction), include_self));
    })
OP(aclnnEmbeddingRenorm, (Tensor self, Tensor indices, double bound, double order),
    { at::embedding_renorm_(self, to_int64(indices), bound, order); })
namespace {
// A3 refuses an empty input for means or maxima (Ascend/pytorch, ci-test, skip_list.json at
// 52087f69e: test_embedding_bag_empty_input), and takes it for sums (op-plugin's
// test_embedding_bag.py, test_embedding_bag_0d).
void with_values(const at::Tensor& weight, const at::Tensor& indices, int64_t mode,
    const emu::Opt<at::Tensor>& per_sample) {
  emu::require(indices.numel() > 0 || mode == 0, "indices is empty and mode is ", mode,
      "; it may be empty in mode 0");
  // In the words that test_EmbeddingBag_per_sample_weights_failures wants, which A3 passes.
  emu::require(!per_sample || per_sample->scalar_type() == weight.scalar_type(),
      "expected scalar type ", weight.scalar_type(), " of perSampleWeights, found ",
      per_sample ? per_sample->scalar_type() : at::kFloat);
}
}  // namespace
SHAPED(aclnnEmbeddingBag,
    (Tensor weight, Tensor indices, Tensor offsets, bool scale, int64_t mode, bool sparse,
        Opt<Tensor> per_sample, bool last, int64_t padding, Tensor out, Tensor bags, Tensor sizes,
        Tensor maxima),
    with_values(weight, indices, mode, per_sample), {
      const auto [value, bag, size, maximum] = at::_embedding_bag(upcast(weight), to_int64(indices),
          to_int64(offsets), scale, mode, sparse, upcast(per_sample), last, padding);
      out.copy_(value);
      if (bags.numel() == bag.numel()) bags.copy_(bag);
      if (sizes.numel() == size.numel()) sizes.copy_(size);
      if (maxima.numel() == maximum.numel()) maxima.copy_(maximum);
    })
OP(aclnnEmbeddingDenseBackward,
    (Tensor grad, Tensor indices, int64_t rows, int64_t padding, bool scale, Tensor out), {
      out.copy_(
          at::embedding_dense_backward(upcast(grad), to_int64(indices), rows, padding, scale));
    })

// self[i][j, …, indices[i], :] = updates[i][j, …, 0, :] along axis -2 or -1 (op-plugin's
// test_scatter_list.py).
CHECKED(aclnnScatterList,
    (Tensors self, Tensor indices, Tensor updates, Opt<Tensor> mask, Text reduce, int64_t axis), {
      require(!self.empty(), "self is empty");
      const int64_t dims = self[0].dim(), along = real_dim(axis, dims, "axis");
      one_of("axis", along - dims, {int64_t{-2}, int64_t{-1}});
      shape("indices", indices, {static_cast<int64_t>(self.size())});
      Shape expected(self[0].sizes());
      expected[along] = 1;
      expected.insert(expected.begin(), static_cast<int64_t>(self.size()));
      shape("updates", updates, expected);
      for (const auto& each : self) shape("self", each, self[0].sizes());
      COMPUTE {
        require(!mask || mask->ne(0).all().item<bool>(),
            "mask has 0; only 1 is emulated, because 0 is not documented");
        for (size_t i = 0; i < self.size(); ++i) {
          const auto at = indices[static_cast<int64_t>(i)].item<int64_t>();
          require(at >= 0 && at < self[i].size(along), "indices[", i, "] is ", at,
              "; allowed: 0 to ", self[i].size(along) - 1);
          self[i].narrow(along, at, 1).copy_(updates[static_cast<int64_t>(i)]);
        }
      };
    })
// The sums of a sparse tensor's values with the same index. unique_indices: the row of the result
// of each value.
CHECKED(aclnnCoalesceSparse,
    (Tensor unique, Tensor unique_indices, Tensor indices, Tensor values, Tensor new_indices,
        Tensor new_values),
    {
      shape("unique_indices", unique_indices, {indices.size(0)});
      require(values.dim() > 0 && values.size(0) == indices.size(0), "values has shape ",
          values.sizes(), " for ", indices.size(0), " indices");
      shape("new_indices", new_indices, {unique.numel(), indices.size(1)});
      COMPUTE {
        const auto rows = to_int64(unique_indices);
        new_indices.index_copy_(0, rows, indices);
        new_values.copy_(at::zeros(new_values.sizes(), upcast(values).options())
                .index_add_(0, rows, upcast(values)));
      };
    })
