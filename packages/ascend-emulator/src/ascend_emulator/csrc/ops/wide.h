// Half types computed in float32, as NPU kernels do: ATen's CPU kernels lack them for some operators, and round in between for others.
#ifndef ASCEND_EMULATOR_OPS_WIDE_H
#define ASCEND_EMULATOR_OPS_WIDE_H
#include "core/op.h"

namespace emu {

inline Tensor wide(const Tensor& tensor) { return tensor.defined() && at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor; }
inline Opt<Tensor> wide(const Opt<Tensor>& tensor) { return tensor ? Opt<Tensor>(wide(*tensor)) : tensor; }
// An output that the caller may have left out.
inline void give(const Opt<Tensor>& out, const Tensor& value) { if (out && value.defined()) out->copy_(value); }
// Dimensions in any of the index types.
inline Tensor index(const Tensor& tensor) { return tensor.to(at::kLong); }

}  // namespace emu

#endif  // ASCEND_EMULATOR_OPS_WIDE_H
