// Half types computed in float32, as NPU kernels do: ATen's CPU kernels lack them for some operators, and round in between for
// others.
#ifndef ASCEND_EMULATOR_OPS_WIDE_H
#define ASCEND_EMULATOR_OPS_WIDE_H
#include "operator/op.h"

namespace emu {

inline Tensor wide(const Tensor& tensor) {
  return tensor.defined() && at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}
inline Opt<Tensor> wide(const Opt<Tensor>& tensor) { return tensor ? Opt<Tensor>(wide(*tensor)) : tensor; }
// An output that the caller may have left out.
inline void give(const Opt<Tensor>& out, const Tensor& value) {
  if (out && value.defined()) out->copy_(value);
}
// Indices may be int32 on the NPU where ATen wants int64.
inline Tensor to_int64(const Tensor& indices) { return indices.scalar_type() == at::kInt ? indices.to(at::kLong) : indices; }
// The two outputs of an operator that has values and indices, say.
inline void copy_both(const std::tuple<Tensor, Tensor>& results, const Tensor& first, const Tensor& second) {
  first.copy_(std::get<0>(results));
  second.copy_(std::get<1>(results));
}

}  // namespace emu

#endif  // ASCEND_EMULATOR_OPS_WIDE_H
