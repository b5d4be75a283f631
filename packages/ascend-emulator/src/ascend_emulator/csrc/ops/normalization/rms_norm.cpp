// Normalizations. Sums are taken in float32, as torch_npu's documentation of npu_rms_norm has it for half types.
#include <ATen/Parallel.h>

#include "core/op.h"

namespace {

using at::Tensor;

// In sixteen partial sums: more accurate than one, and a vector register wide.
template <class T>
float sum_of_squares(const T* x, int64_t width) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += float(x[i + lane]) * float(x[i + lane]);
  for (int lane = 0; i < width; ++i, ++lane) lanes[lane] += float(x[i]) * float(x[i]);
  for (int half = kLanes / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

template <class T>
void rms_norm_rows(const T* x, const T* gamma, T* y, float* rstd, int64_t rows, int64_t width, float epsilon) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / width), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* in = x + row * width;
      T* out = y + row * width;
      const float scale = 1.0f / std::sqrt(sum_of_squares(in, width) / width + epsilon);
      for (int64_t i = 0; i < width; ++i) out[i] = static_cast<T>(float(in[i]) * scale * float(gamma[i]));
      if (rstd) rstd[row] = scale;
    }
  });
}

void check_norm(const Tensor& x, const Tensor& gamma) {
  emu::one_of("x", x, emu::kFloating);
  emu::rank("x", x, 1, 8);
  emu::check(x.dim() >= gamma.dim() && x.sizes().slice(x.dim() - gamma.dim()) == gamma.sizes(), emu::kOpParam, "gamma has shape ",
             gamma.sizes(), ", which is not the end of x's ", x.sizes());
  // float32 beside a 16-bit x: op-plugin's test_npu_rms_norm.py, test_rms_norm_mix_dtype.
  if (gamma.scalar_type() != at::kFloat) emu::same_dtype("gamma", gamma, "x", x);
}

// y = x / rms(x) * gamma over gamma's dimensions, the last ones of x; rstd may be undefined.
void rms_norm(const Tensor& x, const Tensor& gamma, double epsilon, Tensor& y, const Tensor& rstd) {
  const int64_t width = gamma.numel();
  if (gamma.scalar_type() != x.scalar_type()) {
    auto wide = at::empty_like(x, at::kFloat);
    rms_norm(x.to(at::kFloat), gamma, epsilon, wide, rstd);
    y.copy_(wide);
    return;
  }
  const auto input = x.contiguous(), weight = gamma.contiguous();
  auto output = y.is_contiguous() ? y : at::empty_like(input);
  float* scales = rstd.defined() ? rstd.data_ptr<float>() : nullptr;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rms_norm", [&] {
    rms_norm_rows(input.const_data_ptr<scalar_t>(), weight.const_data_ptr<scalar_t>(), output.mutable_data_ptr<scalar_t>(), scales,
                  input.numel() / width, width, static_cast<float>(epsilon));
  });
  if (!output.is_same(y)) y.copy_(output);
}

}  // namespace

// torch_npu's documentation of npu_rms_norm: float16, bfloat16 and float32, gamma of the same dtype (or float32), usually the last dimension.
CHECKED(aclnnRmsNorm, (Tensor x, Tensor gamma, double epsilon, Tensor y, Tensor rstd), {
  check_norm(x, gamma);
  COMPUTE { rms_norm(x, gamma, epsilon, y, rstd); };
})
CHECKED(aclnnAddRmsNorm, (Tensor a, Tensor b, Tensor gamma, double epsilon, Tensor y, Tensor rstd, Tensor sum), {
  check_norm(a, gamma);
  same_dtype("gamma", gamma, "x1", a);
  same_dtype("x2", b, "x1", a);
  shape("x2", b, a.sizes());
  COMPUTE {
    at::add_out(sum, a, b);
    rms_norm(sum, gamma, epsilon, y, rstd);
  };
})
OP(aclnnLayerNorm, (Tensor x, Ints shape, Opt<Tensor> weight, Opt<Tensor> bias, double epsilon, Tensor y, Opt<Tensor> mean, Opt<Tensor> rstd), {
  const auto [out, m, r] = at::native_layer_norm(x, shape, weight, bias, epsilon);
  y.copy_(out);
  if (mean) mean->copy_(m);
  if (rstd) rstd->copy_(r);
})
