// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Shape rules of plain operators, those of the corresponding torch functions, checked at the call
// as in CANN. The macros add the arguments' names for the messages.
#pragma once
#include <functional>

#include "op.h"

namespace emu {

using Shape = c10::SmallVector<int64_t, 8>;
using TensorRefs = std::initializer_list<std::reference_wrapper<const Tensor>>;

// Wraps a dimension to [0, dims). A tensor without dimensions counts as one-dimensional, as in
// PyTorch.
int64_t real_dim(int64_t dim, int64_t dims, const char* argument = "dim");

void broadcasts(const char* names, TensorRefs tensors);
void expands(const char* names, TensorRefs tensors);
void along(const char* out_name, const Tensor& out, const Tensor& self, int64_t dim);
void reduced(const char* out_name, const Tensor& out, const Tensor& self, at::IntArrayRef dims,
    bool keepdim);
inline void reduced(
    const char* out_name, const Tensor& out, const Tensor& self, int64_t dim, bool keepdim) {
  reduced(out_name, out, self, at::IntArrayRef(dim), keepdim);
}
Shape product(
    const char* names, const Tensor& self, const Tensor& other, int64_t least, int64_t most);

}  // namespace emu

// The output has this shape; the shape of LIKE; the shape that the other tensors broadcast to.
#define SHAPE(OUT, ...) emu::shape(#OUT, OUT, __VA_ARGS__)
#define SAME(OUT, LIKE) emu::shape(#OUT, OUT, LIKE.sizes())
#define BROADCAST(...) emu::broadcasts(#__VA_ARGS__, {__VA_ARGS__})
// The other tensors expand to the first one's shape.
#define EXPANDS(...) emu::expands(#__VA_ARGS__, {__VA_ARGS__})
// The output has self's shape, and `dim` is one of its dimensions.
#define ALONG(OUT, SELF, DIM) emu::along(#OUT, OUT, SELF, DIM)
// The output has self's shape with these dimensions removed, or of size 1 with KEEPDIM; no
// dimensions: all.
#define REDUCED(OUT, SELF, DIMS, KEEPDIM) emu::reduced(#OUT, OUT, SELF, DIMS, KEEPDIM)
// Shape of torch.matmul of two tensors with LEAST to MOST dimensions.
#define PRODUCT(SELF, OTHER, LEAST, MOST) emu::product(#SELF "," #OTHER, SELF, OTHER, LEAST, MOST)
