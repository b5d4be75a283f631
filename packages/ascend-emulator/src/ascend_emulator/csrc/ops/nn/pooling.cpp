// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Pooling, unpooling and gradients. Indices are int32 or int64.
#include "operator/shapes.h"
#include "ops/cube_math.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

// torch_npu's documentation of torch.nn.functional.max_pool1d, max_pool2d and max_pool3d: dilation
// must be 1. A3 refuses their samples in PyTorch's tests (Ascend/pytorch, ci-test,
// disabled_testcases.json: aclnnMaxPool3dWithArgmax).
void not_dilated(const Ints& dilation) {
  require(std::all_of(dilation.begin(), dilation.end(), [](int64_t each) { return each == 1; }),
      "dilation is ", at::IntArrayRef(dilation), "; it must be 1");
}

Opt<int64_t> divisor(int64_t value) { return value ? Opt<int64_t>(value) : std::nullopt; }

void store(const std::tuple<Tensor, Tensor>& result, Tensor& out, Tensor& indices) {
  out.copy_(std::get<0>(result));
  indices.copy_(std::get<1>(result));
}
}  // namespace

// Divisor 0: none.
SHAPED(aclnnAvgPool2d,
    (Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil, bool count_padding,
        int64_t divide, CubeMath cube, Tensor out),
    cube.check(self), {
      out.copy_(at::avg_pool2d(
          upcast(cube(self)), kernel, stride, padding, ceil, count_padding, divisor(divide)));
    })
SHAPED(aclnnAvgPool2dBackward,
    (Tensor grad, Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil,
        bool count_padding, int64_t divide, CubeMath cube, Tensor out),
    cube.check(grad), {
      out.copy_(at::avg_pool2d_backward(upcast(cube(grad)), upcast(self), kernel, stride, padding,
          ceil, count_padding, divisor(divide)));
    })
OP(aclnnAvgPool3d,
    (Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil, bool count_padding,
        int64_t divide, Tensor out),
    {
      out.copy_(at::avg_pool3d(
          upcast(self), kernel, stride, padding, ceil, count_padding, divisor(divide)));
    })
OP(aclnnAvgPool3dBackward,
    (Tensor grad, Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil,
        bool count_padding, int64_t divide, Tensor out),
    {
      out.copy_(at::avg_pool3d_backward(upcast(grad), upcast(self), kernel, stride, padding, ceil,
          count_padding, divisor(divide)));
    })

#define MAX_POOL(NAME, FUNCTION)                                                                  \
  SHAPED(aclnn##NAME,                                                                             \
      (Tensor self, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil, Tensor out, \
          Tensor indices),                                                                        \
      not_dilated(dilation), {                                                                    \
        store(at::FUNCTION(upcast(self), kernel, stride, padding, dilation, ceil), out, indices); \
      })                                                                                          \
  OP(aclnn##NAME##Backward,                                                                       \
      (Tensor grad, Tensor self, Tensor indices, Ints kernel, Ints stride, Ints padding,          \
          Ints dilation, bool ceil, Tensor out),                                                  \
      {                                                                                           \
        out.copy_(at::FUNCTION##_backward(upcast(grad), upcast(self), kernel, stride, padding,    \
            dilation, ceil, to_int64(indices)));                                                  \
      })
MAX_POOL(MaxPool3dWithArgmax, max_pool3d_with_indices)
MAX_POOL(
    MaxPool2dWithIndices, max_pool2d_with_indices)  // on Ascend950, and with use_compatible_impl
// The mask's layout is not public: the emulator leaves it empty, and the gradient computes the
// maxima again.
SHAPED(aclnnMaxPool2dWithMask,
    (Tensor self, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil, Tensor out,
        Tensor mask),
    not_dilated(dilation), {
      out.copy_(at::max_pool2d(upcast(self), kernel, stride, padding, dilation, ceil));
      mask.zero_();
    })
OP(aclnnMaxPool2dWithMaskBackward,
    (Tensor grad, Tensor self, Tensor, Ints kernel, Ints stride, Ints padding, Ints dilation,
        bool ceil, Tensor out),
    {
      const auto indices = std::get<1>(
          at::max_pool2d_with_indices(upcast(self), kernel, stride, padding, dilation, ceil));
      out.copy_(at::max_pool2d_with_indices_backward(
          upcast(grad), upcast(self), kernel, stride, padding, dilation, ceil, indices));
    })
OP(aclnnMaxUnpool2d, (Tensor self, Tensor indices, Ints size, Tensor out),
    { out.copy_(at::max_unpool2d(upcast(self), to_int64(indices), size)); })
OP(aclnnMaxUnpool3d,
    (Tensor self, Tensor indices, Ints size, Ints stride, Ints padding, Tensor out),
    { out.copy_(at::max_unpool3d(upcast(self), to_int64(indices), size, stride, padding)); })
