// Gated activation. Semantics: torch_npu's documentation of npu_swiglu (torch_npu/_op_plugin_docs.py, BSD).
#include <ATen/Parallel.h>

#include "core/op.h"

namespace {

using at::Tensor;
using emu::check;
using emu::kOpParam;

template <class T>
void swiglu_rows(const T* x, T* out, int64_t rows, int64_t half) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / half), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* gate = x + row * 2 * half;
      const T* up = gate + half;
      for (int64_t i = 0; i < half; ++i) {
        const float g = gate[i];
        out[row * half + i] = static_cast<T>(g / (1.0f + std::exp(-g)) * float(up[i]));
      }
    }
  });
}

void swiglu(const Tensor& x, int64_t dim, Tensor& out) {
  const int64_t at_dim = at::maybe_wrap_dim(dim, x.dim());
  check(x.size(at_dim) % 2 == 0, kOpParam, "dimension ", dim, " has size ", x.size(at_dim), "; it must be even");
  // The plain loop saves launches on few values; ATen's exponential is vectorized.
  if (at_dim != x.dim() - 1 || !x.is_contiguous() || !out.is_contiguous() || x.numel() > 16384) {
    const auto halves = x.to(at::kFloat).chunk(2, at_dim);
    out.copy_(at::silu(halves[0]).mul_(halves[1]));
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "swiglu", [&] {
    swiglu_rows(x.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), out.numel() / out.size(-1), out.size(-1));
  });
}

}  // namespace

OP(aclnnSwiGlu, (Tensor x, int64_t dim, Tensor out), { swiglu(x, dim, out); })
