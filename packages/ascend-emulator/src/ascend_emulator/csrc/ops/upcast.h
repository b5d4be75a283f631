// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// 16-bit floating types are computed in float32, as NPU kernels do: some of ATen's CPU kernels do
// not support them, others round intermediate results.
#pragma once
#include "operator/op.h"

namespace emu {

inline Tensor upcast(const Tensor& tensor) {
  return tensor.defined() && at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat)
                                                                             : tensor;
}
inline Opt<Tensor> upcast(const Opt<Tensor>& tensor) {
  return tensor ? Opt<Tensor>(upcast(*tensor)) : tensor;
}
// Writes an optional output.
inline void copy_if_given(const Opt<Tensor>& out, const Tensor& value) {
  if (out && value.defined()) out->copy_(value);
}
// Indices may be int32 on the NPU where ATen wants int64.
inline Tensor to_int64(const Tensor& indices) {
  return indices.scalar_type() == at::kInt ? indices.to(at::kLong) : indices;
}
// Writes two outputs, such as values and indices.
inline void copy_both(
    const std::tuple<Tensor, Tensor>& results, const Tensor& first, const Tensor& second) {
  first.copy_(std::get<0>(results));
  second.copy_(std::get<1>(results));
}

}  // namespace emu
