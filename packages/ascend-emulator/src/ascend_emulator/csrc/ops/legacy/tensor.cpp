// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Legacy graph operators that fill, cut, move and choose values.
#include <ATen/CPUGeneratorImpl.h>

#include "operator/graph_op.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

int64_t product_of(const Ints& dims) { return c10::multiply_integers(dims); }

// {1} stands for a tensor without dimensions (FillKernelNpu.cpp).
void filled(const Tensor& y, const Ints& dims) {
  require(y.sizes() == at::IntArrayRef(dims) || (y.dim() == 0 && product_of(dims) == 1),
      "y has shape ", y.sizes(), " and dims is ", at::IntArrayRef(dims));
}

void permutation(const Ints& perm, int64_t dims) {
  Ints sorted = perm, all(dims);
  std::sort(sorted.begin(), sorted.end());
  std::iota(all.begin(), all.end(), 0);
  require(sorted == all, "perm is ", at::IntArrayRef(perm), " for ", dims, " dimensions");
}

// Values and int32 indices of the largest or smallest values along a dimension.
Computation extreme(bool largest, const Tensor& x, const Tensor& indices, const Tensor& values,
    const Attributes& attributes) {
  const auto dim = real_dim(attributes.get("dimension", int64_t{0}), x.dim(), "dimension");
  const bool keep = attributes.get("keep_dims", false);
  reduced("values", values, x, dim, keep);
  reduced("indices", indices, x, dim, keep);
  COMPUTE { copy_both(largest ? at::max(x, dim, keep) : at::min(x, dim, keep), values, indices); };
}

// Rows of `count` indices of true values, and which rows are there. All of them in order if they
// fit: op-plugin's test has that of an NPU. Otherwise a sample without repetition.
void choose(const Tensor& x, const Tensor& indices, const Tensor& mask, int64_t seed) {
  auto found = at::nonzero(x);
  const auto count = indices.size(0);
  if (found.size(0) > count) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
    found = found.index_select(
        0, at::randperm(found.size(0), generator, at::kLong).narrow(0, 0, count));
  }
  indices.zero_();
  indices.narrow(0, 0, found.size(0)).copy_(found);
  mask.copy_(at::arange(count).lt(found.size(0)));
}
}  // namespace

GRAPH_OP(Fill, (Ints dims, Tensor value, Out y), {
  filled(y, dims);
  require(value.numel() == 1, "value has ", value.numel(), " elements; it must have one");
  COMPUTE { y.fill_(value.reshape({})); };
})

GRAPH_OP(Cast, (Tensor x, Out y, Attributes attributes), {
  const auto to = to_scalar_type(static_cast<int32_t>(attributes.get("dst_type", int64_t{0})));
  require(y.scalar_type() == to, "y is ", y.scalar_type(), " and dst_type ", to);
  COMPUTE { y.copy_(x); };
})
GRAPH_OP(Abs, (Tensor x, Out y), {
  COMPUTE { y.copy_(x.abs()); };
})
#define LEGACY_BINARY(TYPE, ...)                  \
  GRAPH_OP(TYPE, (Tensor x1, Tensor x2, Out y), { \
    BROADCAST(y, x1, x2);                         \
    COMPUTE {                                     \
      const auto left = upcast(x1);               \
      const auto right = upcast(x2);              \
      y.copy_(__VA_ARGS__);                       \
    };                                            \
  })
LEGACY_BINARY(Add, left + right)
LEGACY_BINARY(Sub, left - right)
LEGACY_BINARY(Mul, left* right)
LEGACY_BINARY(RealDiv, left / right)

// x is the whole storage (AsStridedKernelNpu.cpp).
GRAPH_OP(AsStrided, (Tensor x, Ints size, Ints stride, Scalar offset, Out y), {
  const auto first = offset.toLong();
  require(stride.size() == size.size(), "stride is ", at::IntArrayRef(stride), " for size ",
      at::IntArrayRef(size));
  auto last = first;
  for (size_t i = 0; i < size.size(); ++i) {
    require(stride[i] >= 0, "stride is ", at::IntArrayRef(stride), "; allowed: 0 or more");
    last += (size[i] - 1) * stride[i];
  }
  require(first >= 0 && (last < x.numel() || product_of(size) == 0), "size ", at::IntArrayRef(size),
      ", stride ", at::IntArrayRef(stride), " and storage_offset ", first, " reach beyond the ",
      x.numel(), " values of x");
  SHAPE(y, size);
  COMPUTE { y.copy_(x.as_strided(size, stride, first)); };
})

GRAPH_OP(ConcatD, (Tensors x, Out y, Attributes attributes), {
  require(static_cast<size_t>(attributes.get("N", static_cast<int64_t>(x.size()))) == x.size() &&
              !x.empty(),
      "N is ", attributes.get("N", int64_t{0}), " for ", x.size(), " tensors");
  const auto dim = real_dim(attributes.get("concat_dim", int64_t{0}), y.dim(), "concat_dim");
  Ints expected = x[0].sizes().vec();
  require(static_cast<int64_t>(expected.size()) == y.dim(), "x has ", expected.size(),
      " dimensions and y ", y.dim());
  expected[dim] = 0;
  for (const auto& each : x) {
    Ints sizes = each.sizes().vec();
    require(each.dim() == y.dim(), "x has shapes ", x[0].sizes(), " and ", each.sizes());
    expected[dim] += sizes[dim];
    sizes[dim] = x[0].size(dim);
    require(x[0].sizes() == at::IntArrayRef(sizes), "x has shapes ", x[0].sizes(), " and ",
        each.sizes());
  }
  SHAPE(y, expected);
  COMPUTE { y.copy_(at::concat(x, dim)); };
})

GRAPH_OP(Slice, (Tensor x, Ints offsets, Ints size, Out y), {
  const auto rank = static_cast<size_t>(x.dim());
  require(offsets.size() == rank && size.size() == rank, "offsets is ", at::IntArrayRef(offsets),
      " and size is ", at::IntArrayRef(size), " for ", rank, " dimensions");
  for (size_t i = 0; i < rank; ++i)
    require(offsets[i] >= 0 && size[i] >= 0 && offsets[i] + size[i] <= x.size(i), "offsets ",
        at::IntArrayRef(offsets), " and size ", at::IntArrayRef(size), " reach beyond x of shape ",
        x.sizes());
  SHAPE(y, size);
  COMPUTE {
    Tensor part = x;
    for (size_t i = 0; i < rank; ++i) part = part.narrow(i, offsets[i], size[i]);
    y.copy_(part);
  };
})

// A set bit of a mask ignores that dimension's begin or end.
GRAPH_OP(
    StridedSlice, (Tensor x, Ints begin, Ints end, Ints strides, Out y, Attributes attributes), {
      const auto rank = static_cast<size_t>(x.dim());
      require(begin.size() == rank && end.size() == rank && strides.size() == rank, "begin is ",
          at::IntArrayRef(begin), ", end is ", at::IntArrayRef(end), " and strides is ",
          at::IntArrayRef(strides), " for ", rank, " dimensions");
      const auto begin_mask = attributes.get("begin_mask", int64_t{0});
      const auto end_mask = attributes.get("end_mask", int64_t{0});
      for (const char* name : {"ellipsis_mask", "new_axis_mask", "shrink_axis_mask"})
        attributes.only(name, int64_t{0});
      Tensor part = x;
      for (size_t i = 0; i < rank; ++i) {
        require(strides[i] > 0, "strides is ", at::IntArrayRef(strides), "; computed: positive");
        const bool from_first = begin_mask >> i & 1;
        const bool to_last = end_mask >> i & 1;
        part = part.slice(static_cast<int64_t>(i), from_first ? 0 : begin[i],
            to_last ? x.size(i) : end[i], strides[i]);
      }
      SAME(y, part);
      COMPUTE { y.copy_(part); };
    })

GRAPH_OP(Transpose, (Tensor x, Ints perm, Out y), {
  permutation(perm, x.dim());
  SAME(y, x.permute(perm));
  COMPUTE { y.copy_(x.permute(perm)); };
})

GRAPH_OP(ConfusionTransposeD, (Tensor x, Out y, Attributes attributes), {
  const auto perm = attributes.get("perm", Ints());
  const auto sizes = attributes.get("shape", Ints());
  const bool first = attributes.get("transpose_first", false);
  require(product_of(sizes) == x.numel(), "shape is ", at::IntArrayRef(sizes), " for ", x.numel(),
      " values");
  permutation(perm, first ? x.dim() : static_cast<int64_t>(sizes.size()));
  const auto value = first ? x.permute(perm) : x.view(sizes).permute(perm);
  if (first) SHAPE(y, sizes);
  else SAME(y, value);
  COMPUTE { y.copy_(value.reshape(y.sizes())); };
})

GRAPH_OP(BroadcastTo, (Tensor x, Ints size, Out y), {
  SHAPE(y, size);
  EXPANDS(y, x);
  COMPUTE { y.copy_(x.expand(y.sizes())); };
})

// `paddings` has the numbers before and after each dimension, the first dimension first.
GRAPH_OP(Pad, (Tensor x, Ints paddings, Out y), {
  require(static_cast<int64_t>(paddings.size()) == 2 * x.dim(), "paddings has ", paddings.size(),
      " values for ", x.dim(), " dimensions");
  Tensor part = y;
  for (int64_t i = 0; i < x.dim(); ++i) {
    const auto before = paddings[2 * i];
    const auto after = paddings[2 * i + 1];
    require(before >= 0 && after >= 0 && y.size(i) == before + x.size(i) + after, "y has shape ",
        y.sizes(), " for paddings ", at::IntArrayRef(paddings), " of x of shape ", x.sizes());
    part = part.narrow(i, before, x.size(i));
  }
  COMPUTE {
    y.zero_();
    part.copy_(x);
  };
})

// Values outside [0, depth) are off everywhere.
GRAPH_OP(OneHotD, (Tensor x, Tensor on_value, Tensor off_value, Out y, Attributes attributes), {
  const auto depth = attributes.get("depth", int64_t{0});
  const auto axis = attributes.get("axis", int64_t{-1});
  require(axis == -1 || axis == x.dim(), "axis is ", axis, "; computed: -1, the last dimension");
  Ints expected = x.sizes().vec();
  expected.push_back(depth);
  SHAPE(y, expected);
  COMPUTE { y.copy_(at::where(x.unsqueeze(-1).eq(at::arange(depth)), on_value, off_value)); };
})

GRAPH_OP(ArgMaxWithValue, (Tensor x, Out indices, Out values, Attributes attributes),
    { return extreme(true, x, indices, values, attributes); })
GRAPH_OP(ArgMinWithValue, (Tensor x, Out indices, Out values, Attributes attributes),
    { return extreme(false, x, indices, values, attributes); })

GRAPH_OP(SortV2, (Tensor x, Out y, Attributes attributes), {
  const auto dim = real_dim(attributes.get("axis", int64_t{-1}), x.dim(), "axis");
  const bool descending = attributes.get("descending", false);
  require(dim == x.dim() - 1, "axis is ", dim,
      "; allowed: the last dimension");  // npu_sort_v2 transposes for another
  COMPUTE { y.copy_(std::get<0>(at::sort(x, dim, descending))); };
})

// Rows of start and end are ranges along `axis` with one value. Along the last of several
// dimensions, their columns are the entries of the first dimension (op-plugin's
// test_masked_fill_range.py).
GRAPH_OP(MaskedFillRange,
    (Tensor x, Tensor start, Tensor end, Tensor value, Out y, Attributes attributes), {
      const auto axis = real_dim(attributes.get("axis", int64_t{-1}), x.dim(), "axis");
      const bool by_entry = x.dim() > 1 && axis == x.dim() - 1;
      require(value.numel() == start.size(0), "value has ", value.numel(), " elements for ",
          start.size(0), " rows of start");
      require(!by_entry || start.size(1) == x.size(0), "start has ", start.size(1), " columns for ",
          x.size(0), " entries of x");
      COMPUTE {
        const auto from = start.accessor<int32_t, 2>();
        const auto to = end.accessor<int32_t, 2>();
        y.copy_(x);
        for (int64_t i = 0; i < start.size(0); ++i) {
          for (int64_t j = 0; j < start.size(1); ++j) {
            if (from[i][j] >= to[i][j]) continue;
            check(from[i][j] >= 0 && to[i][j] <= x.size(axis), kOpFailed, "the range ", from[i][j],
                " to ", to[i][j], " is outside of ", x.size(axis));
            const auto entry = by_entry ? y.select(0, j) : Tensor(y);
            entry.narrow(by_entry ? axis - 1 : axis, from[i][j], to[i][j] - from[i][j])
                .fill_(value.select(0, i));
          }
        }
      };
    })

GRAPH_OP(RandomChoiceWithMask, (Tensor x, Out indices, Out mask, Attributes attributes), {
  const auto count = attributes.get("count", int64_t{0});
  const auto seed = attributes.get("seed", int64_t{0});
  const auto second = attributes.get("seed2", int64_t{0});
  SHAPE(indices, {count, x.dim()});
  SHAPE(mask, {count});
  COMPUTE { choose(x, indices, mask, seed + (second << 32)); };
})

// Eight signs in a byte, the first in the lowest bit; 1 stands for zero and positive values.
GRAPH_OP(SignBitsPack, (Tensor x, Out y, Attributes attributes), {
  const auto size = attributes.get("size", int64_t{0});
  const auto bytes = (x.numel() + 7) / 8;
  require(size > 0 && bytes % size == 0, "size is ", size, " for ", bytes, " bytes");
  SHAPE(y, {size, bytes / size});
  COMPUTE {
    const auto bits = at::zeros({bytes * 8}, at::kByte);
    bits.narrow(0, 0, x.numel()).copy_(x.lt(0).logical_not());
    const auto weights = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte);
    y.copy_((bits.view({-1, 8}) * weights).sum(1, false, at::kByte).view(y.sizes()));
  };
})
GRAPH_OP(SignBitsUnpack, (Tensor x, Out y, Attributes attributes), {
  const auto size = attributes.get("size", int64_t{0});
  require(
      to_scalar_type(static_cast<int32_t>(attributes.get("dtype", int64_t{0}))) == y.scalar_type(),
      "y is ", y.scalar_type(), "; attribute dtype says otherwise");
  require(size > 0 && x.numel() * 8 % size == 0, "size is ", size, " for ", x.numel() * 8, " bits");
  SHAPE(y, {size, x.numel() * 8 / size});
  COMPUTE {
    const auto weights = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte);
    y.copy_(x.view({-1, 1})
            .bitwise_and(weights)
            .ne(0)
            .to(y.scalar_type())
            .mul(2)
            .sub(1)
            .view(y.sizes()));
  };
})

// In blocks of 16 channels: c1_len of them, from an offset in each input (op-plugin's
// test_strideadd.py).
GRAPH_OP(StrideAdd, (Tensor x1, Tensor x2, Out y, Attributes attributes), {
  const int64_t offsets[] = {
      attributes.get("x1_c1_offset", int64_t{0}), attributes.get("x2_c1_offset", int64_t{0})};
  const auto channels = attributes.get("c1_len", int64_t{0}) * 16;
  const Tensor inputs[] = {x1, x2};
  for (int i = 0; i < 2; ++i) {
    const auto blocks = (inputs[i].size(1) + 15) / 16;
    require(offsets[i] >= 0 && offsets[i] * 16 + channels <= blocks * 16, "x", i + 1, " has ",
        blocks, " blocks of channels; the offset is ", offsets[i], " and c1_len ", channels / 16);
    Ints expected = inputs[i].sizes().vec();
    expected[1] = channels;
    SHAPE(y, expected);
  }
  COMPUTE {
    y.zero_();
    for (int i = 0; i < 2; ++i) {
      const auto there = std::min(channels, inputs[i].size(1) - offsets[i] * 16);
      y.narrow(1, 0, there).add_(inputs[i].narrow(1, offsets[i] * 16, there));
    }
  };
})
