// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Operators that copy and rearrange values.
#include "operator/shapes.h"
#include "ops/quantization/low_precision.h"
#include "ops/upcast.h"

namespace {

// HiF8 and e1m2, with which ATen does not compute.
bool is_own_format(const at::Tensor& x) {
  return x.scalar_type() == at::kBits8 || x.scalar_type() == at::kBits4x2;
}

void check_cast(const at::Tensor& self, const at::Tensor& out) {
  if (!emu::is_four_bits(self.scalar_type()) && !emu::is_four_bits(out.scalar_type()))
    SAME(out, self);
}

// Values above the largest become infinite if the format has that, as in PyTorch's casts to float8.
void cast(const at::Tensor& self, const at::Tensor& out) {
  if (!is_own_format(self) && !is_own_format(out)) return void(out.copy_(self));
  const auto values = is_own_format(self) ? emu::decoded(self) : self.to(at::kFloat);
  if (is_own_format(out)) emu::encode(values, out, emu::formats::Rounding::rint, false);
  else out.copy_(values);
}

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
    for (int64_t i = 0; fits && i < tensor.dim(); ++i)
      fits = i == dim || tensor.size(i) == first->size(i);
    emu::require(fits, "tensors has shapes ", first->sizes(), " and ", tensor.sizes(),
        "; allowed: a difference only in dimension ", dim);
    shape[dim] += tensor.size(dim);
  }
  return shape;
}

emu::Shape stack_shape(const emu::Tensors& tensors, int64_t dim) {
  emu::require(!tensors.empty(), "tensors is empty");
  for (const auto& tensor : tensors)
    emu::require(tensor.sizes() == tensors[0].sizes(), "tensors has shapes ", tensors[0].sizes(),
        " and ", tensor.sizes(), "; they must be the same");
  emu::Shape shape(tensors[0].sizes());
  shape.insert(shape.begin() + emu::real_dim(dim, tensors[0].dim() + 1),
      static_cast<int64_t>(tensors.size()));
  return shape;
}

emu::Shape repeat_shape(const at::Tensor& self, const emu::Ints& repeats) {
  const int64_t more = static_cast<int64_t>(repeats.size()) - self.dim();
  emu::require(more >= 0, "repeats has ", repeats.size(), " numbers; allowed: at least ",
      self.dim(), ", the dimensions of self");
  emu::Shape shape(repeats);
  for (int64_t i = 0; i < self.dim(); ++i) shape[more + i] *= self.size(i);
  return shape;
}

// Two values of four bits are a byte, so that the last dimension is padded by half as many.
emu::Ints pads_of_bytes(const at::Tensor& self, emu::Ints pad) {
  if (!emu::is_four_bits(self.scalar_type())) return pad;
  for (size_t i = 0; i < std::min<size_t>(pad.size(), 2); ++i) {
    emu::require(pad[i] % 2 == 0, "pad has ", pad[i],
        " in the last dimension; of float4 even numbers are allowed");
    pad[i] /= 2;
  }
  return pad;
}

// Pairs of numbers, from the last dimension backwards.
emu::Shape pad_shape(const at::Tensor& self, const emu::Ints& given) {
  const auto pad = pads_of_bytes(self, given);
  const auto pairs = static_cast<int64_t>(pad.size()) / 2;
  emu::require(pad.size() % 2 == 0 && pairs <= self.dim(), "pad has ", pad.size(),
      " numbers; allowed: an even number, ", 2 * self.dim(), " at most");
  emu::Shape shape(self.sizes());
  for (int64_t i = 0; i < pairs; ++i) shape[self.dim() - 1 - i] += pad[2 * i] + pad[2 * i + 1];
  return shape;
}

}  // namespace

SHAPED(
    aclnnInplaceCopy, (Tensor self, Tensor source), EXPANDS(self, source), { self.copy_(source); })
SHAPED(aclnnCast, (Tensor self, DType, Tensor out), check_cast(self, out), { cast(self, out); })
SHAPED(aclnnCat, (Tensors tensors, int64_t dim, Tensor out), SHAPE(out, cat_shape(tensors, dim)),
    { at::concat_out(out, tensors, dim); })
SHAPED(aclnnStack, (Tensors tensors, int64_t dim, Tensor out),
    SHAPE(out, stack_shape(tensors, dim)), { at::stack_out(out, tensors, dim); })
SHAPED(aclnnRepeat, (Tensor self, Ints repeats, Tensor out),
    SHAPE(out, repeat_shape(self, repeats)), { out.copy_(self.repeat(repeats)); })
SHAPED(aclnnFlip, (Tensor self, Ints dims, Tensor out), SAME(out, self),
    { at::flip_out(out, self, dims); })
SHAPED(aclnnRoll, (Tensor self, Ints shifts, Ints dims, Tensor out), SAME(out, self),
    { at::roll_out(out, self, shifts, dims); })
// Float4 is filled with zeros only. Float8 shrinks not at all (op-plugin's
// test_constant_pad_nd.py).
CHECKED(aclnnConstantPadNd, (Tensor self, Ints pad, Scalar value, Tensor out), {
  shape("out", out, pad_shape(self, pad));
  const bool four = emu::is_four_bits(self.scalar_type());
  if (emu::is_low_precision(self))
    require(std::all_of(pad.begin(), pad.end(), [](int64_t each) { return each >= 0; }), "pad is ",
        listed(pad), "; of float8 and float4, numbers below 0 are not allowed");
  require_emulated(
      !four || value.to<double>() == 0, "value ", value.to<double>(), " of float4 is not emulated");
  COMPUTE {
    if (!four) return void(at::constant_pad_nd_out(out, self, pad, value));
    out.view(at::kByte).copy_(
        at::constant_pad_nd(self.view(at::kByte), pads_of_bytes(self, pad), 0));
  };
})

// torch_npu's documentation of torch.repeat_interleave: the output has less than 2^22 elements.
namespace {
void not_too_many(const at::Tensor& out) {
  emu::require(
      out.numel() < 1 << 22, "out has ", out.numel(), " elements; allowed: less than ", 1 << 22);
}

// ATen writes outside of its result before it refuses them.
void repeats_not_negative(const at::Tensor& repeats) {
  const auto least = repeats.numel() ? repeats.min().item<int64_t>() : 0;
  emu::check(least >= 0, emu::kOpFailed, "repeats has the value ", least,
      ", which is out of range; allowed: from 0");
}
}  // namespace
SHAPED(aclnnRepeatInterleave, (Tensor self, Tensor repeats, int64_t size, Tensor out),
    not_too_many(out), {
      repeats_not_negative(repeats);
      out.copy_(at::repeat_interleave(self, repeats, std::nullopt, size));
    })
SHAPED(aclnnRepeatInterleaveWithDim,
    (Tensor self, Tensor repeats, int64_t dim, int64_t size, Tensor out), not_too_many(out), {
      repeats_not_negative(repeats);
      out.copy_(at::repeat_interleave(self, repeats, dim, size));
    })
SHAPED(aclnnRepeatInterleaveInt, (Tensor self, int64_t repeats, int64_t size, Tensor out),
    not_too_many(out), { out.copy_(at::repeat_interleave(self, repeats, std::nullopt, size)); })
SHAPED(aclnnRepeatInterleaveIntWithDim,
    (Tensor self, int64_t repeats, int64_t dim, int64_t size, Tensor out), not_too_many(out),
    { out.copy_(at::repeat_interleave(self, repeats, dim, size)); })

OP(aclnnChannelShuffle, (Tensor self, int64_t groups, Tensor out),
    { out.copy_(at::channel_shuffle(self, groups)); })
OP(aclnnChunkCat, (Tensors tensors, int64_t dim, int64_t chunks, Tensor out),
    { out.copy_(at::_chunk_cat(tensors, dim, chunks)); })
OP(aclnnRepeatInterleaveTensor, (Tensor repeats, int64_t total, Tensor out), {
  repeats_not_negative(repeats);
  out.copy_(at::repeat_interleave(to_int64(repeats), Opt<int64_t>(total)));
})
OP(aclnnUnfoldGrad, (Tensor grad, Ints sizes, int64_t dim, int64_t size, int64_t step, Tensor out),
    { out.copy_(at::unfold_backward(upcast(grad), sizes, dim, size, step)); })
OP_OF_VALUES(aclnnRepeatInterleaveGrad, (Tensor grad, Tensor repeats, int64_t dim, Tensor out), {
  const auto counts =
      repeats.numel() == 1 ? to_int64(repeats).expand({out.size(dim)}) : to_int64(repeats);
  out.copy_(
      at::zeros_like(upcast(out)).index_add(dim, at::repeat_interleave(counts), upcast(grad)));
})

namespace {
using namespace emu;

void check_split(const Tensor& self, const Ints& sizes, int64_t dim, const Tensors& out) {
  dim = real_dim(dim, self.dim());
  require(out.size() == sizes.size(), "splitSize has ", sizes.size(), " numbers and out ",
      out.size(), " tensors");
  int64_t sum = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    Shape expected(self.sizes());
    expected[dim] = sizes[i];
    shape("out", out[i], expected);
    sum += sizes[i];
  }
  require(sum == self.size(dim), "splitSize has the sum ", sum, "; it must be ", self.size(dim),
      ", dimension ", dim, " of self");
}

// The view of npu_indexing; bit i of a mask is about the ith number (torch_npu's documentation).
Tensor strided_slice(const Tensor& self, const Ints& begin, const Ints& end, const Ints& strides,
    int64_t begin_mask, int64_t end_mask, int64_t ellipsis_mask, int64_t new_axis_mask,
    int64_t shrink_axis_mask) {
  const auto set = [](int64_t mask, size_t i) { return (mask >> i & 1) != 0; };
  require(begin.size() == end.size() && (strides.empty() || strides.size() == begin.size()) &&
              begin.size() < 63,
      "begin, end and strides have ", begin.size(), ", ", end.size(), " and ", strides.size(),
      " numbers");
  int64_t indexed = 0, ellipses = 0;
  for (size_t i = 0; i < begin.size(); ++i) {
    ellipses += set(ellipsis_mask, i);
    indexed += !set(ellipsis_mask, i) && !set(new_axis_mask, i);
  }
  require(ellipses <= 1 && indexed <= self.dim(), "begin indexes ", indexed, " dimensions with ",
      ellipses, " ellipses; allowed: ", self.dim(), " and 1");
  Tensor out = self;
  int64_t dim = 0;
  for (size_t i = 0; i < begin.size(); ++i) {
    if (set(ellipsis_mask, i)) {
      dim += self.dim() - indexed;
    } else if (set(new_axis_mask, i)) {
      out = out.unsqueeze(dim++);
    } else if (set(shrink_axis_mask, i)) {
      const int64_t size = out.size(dim), index = begin[i] < 0 ? begin[i] + size : begin[i];
      require(index >= 0 && index < size, "begin is ", at::IntArrayRef(begin), "; ", begin[i],
          " is outside a dimension of ", size);
      out = out.select(dim, index);
    } else {
      const int64_t stride = strides.empty() ? 1 : strides[i];
      require(stride > 0, "strides is ", at::IntArrayRef(strides), "; above 0 is emulated");
      const auto limit = [](bool masked, int64_t value) {
        return masked ? std::nullopt : Opt<int64_t>(value);
      };
      out = out.slice(
          dim++, limit(set(begin_mask, i), begin[i]), limit(set(end_mask, i), end[i]), stride);
    }
  }
  return out;
}

void check_confusion(const Tensor& self, const Ints& permutation, const Ints& sizes,
    bool transpose_first, const Tensor& out) {
  auto sorted = permutation;
  std::sort(sorted.begin(), sorted.end());
  const auto dims = transpose_first ? self.dim() : static_cast<int64_t>(sizes.size());
  bool whole = static_cast<int64_t>(sorted.size()) == dims;
  for (int64_t i = 0; whole && i < dims; ++i) whole = sorted[i] == i;
  require(whole, "perm is ", at::IntArrayRef(permutation), "; it must be a permutation of ", dims,
      " dimensions");
  require(c10::multiply_integers(sizes) == self.numel(), "shape is ", at::IntArrayRef(sizes),
      " for self's ", self.sizes());
  Shape expected(sizes);
  if (!transpose_first)
    for (int64_t i = 0; i < dims; ++i) expected[i] = sizes[permutation[i]];
  shape("out", out, expected);
}
}  // namespace

SHAPED(aclnnSplitWithSize, (Tensor self, Ints sizes, int64_t dim, Tensors out),
    check_split(self, sizes, dim, out), {
      int64_t first = 0;
      for (size_t i = 0; i < sizes.size(); first += sizes[i++])
        out[i].copy_(self.narrow(dim, first, sizes[i]));
    })
CHECKED(aclnnStridedSlice,
    (Tensor self, Ints begin, Ints end, Ints strides, int64_t begin_mask, int64_t end_mask,
        int64_t ellipsis_mask, int64_t new_axis_mask, int64_t shrink_axis_mask, Tensor out),
    {
      const auto view = strided_slice(self, begin, end, strides, begin_mask, end_mask,
          ellipsis_mask, new_axis_mask, shrink_axis_mask);
      SAME(out, view);
      COMPUTE { out.copy_(view); };
    })
// A transposition and a new shape, in either order.
CHECKED(aclnnConfusionTranspose,
    (Tensor self, Ints permutation, Ints sizes, bool transpose_first, Tensor out), {
      check_confusion(self, permutation, sizes, transpose_first, out);
      COMPUTE {
        out.copy_(transpose_first ? self.permute(permutation).reshape(sizes)
                                  : self.reshape(sizes).permute(permutation));
      };
    })
