// Operators that copy and rearrange values.
#include "operator/shapes.h"
#include "ops/upcast.h"

namespace {

// Shapes may differ in one dimension; empty one-dimensional tensors are ignored, as in torch.cat.
emu::Shape cat_shape(const emu::Tensors& tensors, int64_t dim) {
  const at::Tensor* first = nullptr;
  emu::Shape shape{0};
  for (const auto& tensor : tensors) {
    if (tensor.dim() == 1 && tensor.numel() == 0) continue;
    if (!first) {
      first = &tensor;
      shape = tensor.sizes();
      dim = emu::real_dim(dim, tensor.dim());
      continue;
    }
    bool fits = tensor.dim() == first->dim();
    for (int64_t i = 0; fits && i < tensor.dim(); ++i) fits = i == dim || tensor.size(i) == first->size(i);
    emu::check(fits, emu::kOpParam, "tensors has shapes ", first->sizes(), " and ", tensor.sizes(),
        "; allowed: a difference in dimension ", dim, " alone");
    shape[dim] += tensor.size(dim);
  }
  return shape;
}

emu::Shape stack_shape(const emu::Tensors& tensors, int64_t dim) {
  emu::check(!tensors.empty(), emu::kOpParam, "tensors is empty");
  for (const auto& tensor : tensors)
    emu::check(tensor.sizes() == tensors[0].sizes(), emu::kOpParam, "tensors has shapes ", tensors[0].sizes(), " and ",
        tensor.sizes(), "; they must be the same");
  emu::Shape shape(tensors[0].sizes());
  shape.insert(shape.begin() + emu::real_dim(dim, tensors[0].dim() + 1), static_cast<int64_t>(tensors.size()));
  return shape;
}

emu::Shape repeat_shape(const at::Tensor& self, const emu::Ints& repeats) {
  const int64_t more = static_cast<int64_t>(repeats.size()) - self.dim();
  emu::check(more >= 0, emu::kOpParam, "repeats has ", repeats.size(), " numbers; allowed: at least ", self.dim(),
      ", the dimensions of self");
  emu::Shape shape(repeats);
  for (int64_t i = 0; i < self.dim(); ++i) shape[more + i] *= self.size(i);
  return shape;
}

// Pairs of numbers, from the last dimension backwards.
emu::Shape pad_shape(const at::Tensor& self, const emu::Ints& pad) {
  const auto pairs = static_cast<int64_t>(pad.size()) / 2;
  emu::check(pad.size() % 2 == 0 && pairs <= self.dim(), emu::kOpParam, "pad has ", pad.size(),
      " numbers; allowed: an even number, ", 2 * self.dim(), " at most");
  emu::Shape shape(self.sizes());
  for (int64_t i = 0; i < pairs; ++i) shape[self.dim() - 1 - i] += pad[2 * i] + pad[2 * i + 1];
  return shape;
}

}  // namespace

SHAPED(aclnnInplaceCopy, (Tensor self, Tensor source), EXPANDS(self, source), { self.copy_(source); })
SHAPED(aclnnCast, (Tensor self, DType, Tensor out), SAME(out, self), { out.copy_(self); })
SHAPED(aclnnCat, (Tensors tensors, int64_t dim, Tensor out), SHAPE(out, cat_shape(tensors, dim)),
    { at::cat_out(out, tensors, dim); })
SHAPED(aclnnStack, (Tensors tensors, int64_t dim, Tensor out), SHAPE(out, stack_shape(tensors, dim)),
    { at::stack_out(out, tensors, dim); })
SHAPED(aclnnRepeat, (Tensor self, Ints repeats, Tensor out), SHAPE(out, repeat_shape(self, repeats)),
    { out.copy_(self.repeat(repeats)); })
SHAPED(aclnnFlip, (Tensor self, Ints dims, Tensor out), SAME(out, self), { at::flip_out(out, self, dims); })
SHAPED(aclnnRoll, (Tensor self, Ints shifts, Ints dims, Tensor out), SAME(out, self), { at::roll_out(out, self, shifts, dims); })
SHAPED(aclnnConstantPadNd, (Tensor self, Ints pad, Scalar value, Tensor out), SHAPE(out, pad_shape(self, pad)),
    { at::constant_pad_nd_out(out, self, pad, value); })

// torch_npu's documentation of torch.repeat_interleave: the output has less than 2^22 elements.
namespace {
void not_too_many(const at::Tensor& out) {
  emu::check(out.numel() < 1 << 22, emu::kOpParam, "out has ", out.numel(), " elements; allowed: less than ", 1 << 22);
}
}  // namespace
SHAPED(aclnnRepeatInterleave, (Tensor self, Tensor repeats, int64_t size, Tensor out), not_too_many(out),
    { out.copy_(at::repeat_interleave(self, repeats, std::nullopt, size)); })
SHAPED(aclnnRepeatInterleaveWithDim, (Tensor self, Tensor repeats, int64_t dim, int64_t size, Tensor out), not_too_many(out),
    { out.copy_(at::repeat_interleave(self, repeats, dim, size)); })
SHAPED(aclnnRepeatInterleaveInt, (Tensor self, int64_t repeats, int64_t size, Tensor out), not_too_many(out),
    { out.copy_(at::repeat_interleave(self, repeats, std::nullopt, size)); })
SHAPED(aclnnRepeatInterleaveIntWithDim, (Tensor self, int64_t repeats, int64_t dim, int64_t size, Tensor out), not_too_many(out),
    { out.copy_(at::repeat_interleave(self, repeats, dim, size)); })

OP(aclnnChannelShuffle, (Tensor self, int64_t groups, Tensor out), { out.copy_(at::channel_shuffle(self, groups)); })
OP(aclnnChunkCat, (Tensors tensors, int64_t dim, int64_t chunks, Tensor out),
    { out.copy_(at::_chunk_cat(tensors, dim, chunks)); })
OP(aclnnRepeatInterleaveTensor, (Tensor repeats, int64_t total, Tensor out),
    { out.copy_(at::repeat_interleave(to_int64(repeats), Opt<int64_t>(total))); })
OP(aclnnUnfoldGrad, (Tensor grad, Ints sizes, int64_t dim, int64_t size, int64_t step, Tensor out),
    { out.copy_(at::unfold_backward(upcast(grad), sizes, dim, size, step)); })
OP_OF_VALUES(aclnnRepeatInterleaveGrad, (Tensor grad, Tensor repeats, int64_t dim, Tensor out), {
  const auto counts = repeats.numel() == 1 ? to_int64(repeats).expand({out.size(dim)}) : to_int64(repeats);
  out.copy_(at::zeros_like(upcast(out)).index_add(dim, at::repeat_interleave(counts), upcast(grad)));
})
