// Operators that read or write at indices.
#include "../core/op.h"

namespace {

// torch_npu passes an empty tensor where a dimension is not indexed; where all are empty, none of an index's values are (it spreads
// indices over one another beforehand), and no list is returned.
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

// Index tensors may be int32 on the NPU where ATen wants int64.
at::Tensor wide(const at::Tensor& index) { return index.scalar_type() == at::kInt ? index.to(at::kLong) : index; }

// 0 none, 1 add, 2 multiply (op-plugin's ScatterKernelNpuOpApi.cpp).
template <class Source>
void scatter(at::Tensor& out, const at::Tensor& self, int64_t dim, const at::Tensor& index, const Source& source, int64_t reduction) {
  if (reduction == 0) {
    at::scatter_out(out, self, dim, wide(index), source);
  } else {
    emu::check(reduction == 1 || reduction == 2, emu::kOpParam, "reduction ", reduction, "; 0 none, 1 add and 2 multiply are there");
    at::scatter_out(out, self, dim, wide(index), source, reduction == 1 ? "add" : "multiply");
  }
}

}  // namespace

OP(aclnnEmbedding, (Tensor weight, Tensor indices, Tensor out), { at::embedding_out(out, weight, indices); })
OP(aclnnIndexSelect, (Tensor self, int64_t dim, Tensor index, Tensor out), { at::index_select_out(out, self, dim, index); })
OP(aclnnIndex, (Tensor self, Tensors indices, Tensor out), {
  if (!out.numel()) return;  // as of x[False], whose index is empty because it selects nothing
  if (const auto list = index_list(indices)) at::index_out(out, self, *list);
})
OP(aclnnIndexPutImpl, (Tensor self, Tensors indices, Tensor values, bool accumulate, bool), {
  if (const auto list = index_list(indices)) at::_index_put_impl_(self, *list, values, accumulate, false);
})
OP(aclnnIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out), {
  at::index_copy_out(out, self, dim, wide(index), source);
})
OP(aclnnInplaceIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source), { self.index_copy_(dim, wide(index), source); })
OP(aclnnIndexAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Scalar alpha, Tensor out), {
  at::index_add_out(out, self, dim, index, source, alpha);
})
OP(aclnnIndexFill, (Tensor self, int64_t dim, Tensor index, Scalar value, Tensor out), { out.copy_(at::index_fill(self, dim, wide(index), value)); })
OP(aclnnInplaceIndexFill, (Tensor self, int64_t dim, Tensor index, Scalar value), { self.index_fill_(dim, wide(index), value); })
OP(aclnnGather, (Tensor self, int64_t dim, Tensor index, Tensor out), { at::gather_out(out, self, dim, wide(index)); })
OP(aclnnScatter, (Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduction, Tensor out), {
  scatter(out, self, dim, index, source, reduction);
})
OP(aclnnScatterValue, (Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduction, Tensor out), {
  scatter(out, self, dim, index, value, reduction);
})
OP(aclnnInplaceScatter, (Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduction), {
  scatter(self, self, dim, index, source, reduction);
})
OP(aclnnInplaceScatterValue, (Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduction), {
  scatter(self, self, dim, index, value, reduction);
})
OP(aclnnScatterAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out), {
  at::scatter_add_out(out, self, dim, wide(index), source);
})
// Rows of `indices` (its last dimension) address leading dimensions of self; `updates` holds one slice a row.
OP(aclnnScatterNdUpdate, (Tensor self, Tensor indices, Tensor updates), {
  c10::List<std::optional<at::Tensor>> at_dims;
  for (const auto& column : wide(indices).unbind(-1)) at_dims.push_back(column);
  self.index_put_(at_dims, updates);
})

OP(aclnnInplaceMaskedFillScalar, (Tensor self, Tensor mask, Scalar value), { self.masked_fill_(mask, value); })
OP(aclnnInplaceMaskedFillTensor, (Tensor self, Tensor mask, Tensor value), { self.masked_fill_(mask, value); })
OP(aclnnInplaceMaskedScatter, (Tensor self, Tensor mask, Tensor source), { self.masked_scatter_(mask, source); })
OP(aclnnMaskedSelect, (Tensor self, Tensor mask, Result out), { out.assign(at::masked_select(self, mask)); })
OP(aclnnNonzero, (Tensor self, Result out), { out.assign(at::nonzero(self)); })
// The V2 form has one row a dimension.
OP(aclnnNonzeroV2, (Tensor self, Result out), { out.assign(at::nonzero(self).t().contiguous()); })
