// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Operators that fill a tensor.
#include "core/device.h"
#include "operator/shapes.h"

namespace {

constexpr uintptr_t kPage = 4096;
constexpr int64_t kZeroByPages = 4 << 20;

// Large tensors (KV caches) are zeroed by returning their pages, so they take no host memory until
// they are written.
void clear(const at::Tensor& self) {
  const auto bytes = static_cast<int64_t>(self.nbytes());
  if (!self.is_contiguous() || bytes < kZeroByPages) {
    self.zero_();
    return;
  }
  const auto start = reinterpret_cast<uintptr_t>(self.data_ptr()), end = start + bytes;
  const auto first = (start + kPage - 1) & ~(kPage - 1), last = end & ~(kPage - 1);
  if (!emu::zero_pages(reinterpret_cast<void*>(first), last - first)) {
    self.zero_();
    return;
  }
  memset(reinterpret_cast<void*>(start), 0, first - start);
  memset(reinterpret_cast<void*>(last), 0, end - last);
}

}  // namespace

OP(aclnnInplaceZero, (Tensor self), { clear(self); })
OP(aclnnInplaceOne, (Tensor self), { self.fill_(1); })
OP(aclnnInplaceFillScalar, (Tensor self, Scalar value), { self.fill_(value); })
SHAPED(aclnnInplaceFillTensor, (Tensor self, Tensor value), EXPANDS(self, value),
    { self.fill_(value); })
OP(aclnnInplaceFillDiagonal, (Tensor self, Scalar value, bool wrap),
    { self.fill_diagonal_(value, wrap); })
OP(aclnnArange, (Scalar start, Scalar end, Scalar step, Tensor out),
    { at::arange_out(out, start, end, step); })
OP(aclnnRange, (Scalar start, Scalar end, Scalar step, Tensor out),
    { at::range_out(out, start, end, step); })
SHAPED(aclnnLinspace, (Scalar start, Scalar end, int64_t steps, Tensor out), SHAPE(out, {steps}),
    { at::linspace_out(out, start, end, steps); })
SHAPED(aclnnEye, (int64_t rows, int64_t columns, Tensor out), SHAPE(out, {rows, columns}),
    { at::eye_out(out, rows, columns); })
OP(aclnnOneHot, (Tensor self, int64_t depth, Tensor on, Tensor off, int64_t axis, Tensor out), {
  with_index("self", self, depth, [&] {
    const auto hot = at::one_hot(self.to(at::kLong), depth).to(at::kBool);
    out.copy_(at::where(axis < 0 ? hot : hot.movedim(-1, axis), on, off));
  });
})

OP(aclnnLogSpace, (Scalar start, Scalar end, int64_t steps, double base, Tensor out), {
  out.copy_(at::logspace(
      start, end, steps, base, out.is_floating_point() ? at::kDouble : out.scalar_type()));
})
