// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Interpolation, sampling on grids and padding by reflection or replication, with their gradients.
// Scales <= 0 are ignored.
#include "operator/shapes.h"
#include "ops/upcast.h"

namespace {
using namespace emu;
Opt<double> scale(double value) { return value > 0 ? Opt<double>(value) : std::nullopt; }
}  // namespace

#define UPSAMPLE_1D(NAME, FUNCTION)                                       \
  OP(aclnnUpsample##NAME, (Tensor self, Ints size, double w, Tensor out), \
      { out.copy_(at::FUNCTION(upcast(self), size, scale(w))); })
#define UPSAMPLE_1D_GRADIENT(NAME, FUNCTION)                                                    \
  OP(aclnnUpsample##NAME##Backward, (Tensor grad, Ints size, Ints input, double w, Tensor out), \
      { out.copy_(at::FUNCTION##_backward(upcast(grad), size, input, scale(w))); })
#define UPSAMPLE_2D(NAME, FUNCTION)                                                 \
  OP(aclnnUpsample##NAME, (Tensor self, Ints size, double h, double w, Tensor out), \
      { out.copy_(at::FUNCTION(upcast(self), size, scale(h), scale(w))); })
#define UPSAMPLE_2D_GRADIENT(NAME, FUNCTION)                                \
  OP(aclnnUpsample##NAME##Backward,                                         \
      (Tensor grad, Ints size, Ints input, double h, double w, Tensor out), \
      { out.copy_(at::FUNCTION##_backward(upcast(grad), size, input, scale(h), scale(w))); })
#define UPSAMPLE_3D(NAME, FUNCTION)                                                            \
  OP(aclnnUpsample##NAME, (Tensor self, Ints size, double d, double h, double w, Tensor out),  \
      { out.copy_(at::FUNCTION(upcast(self), size, scale(d), scale(h), scale(w))); })          \
  OP(aclnnUpsample##NAME##Backward,                                                            \
      (Tensor grad, Ints size, Ints input, double d, double h, double w, Tensor out), {        \
        out.copy_(                                                                             \
            at::FUNCTION##_backward(upcast(grad), size, input, scale(d), scale(h), scale(w))); \
      })
#define ALIGNED_2D(NAME, FUNCTION)                                                              \
  OP(aclnnUpsample##NAME, (Tensor self, Ints size, bool align, double h, double w, Tensor out), \
      { out.copy_(at::FUNCTION(upcast(self), size, align, scale(h), scale(w))); })
#define ALIGNED_2D_GRADIENT(NAME, FUNCTION)                                                       \
  OP(aclnnUpsample##NAME,                                                                         \
      (Tensor grad, Ints size, Ints input, bool align, double h, double w, Tensor out), {         \
        out.copy_(at::FUNCTION##_backward(upcast(grad), size, input, align, scale(h), scale(w))); \
      })

// The older versions have no scales: op-plugin drops them.
OP(aclnnUpsampleNearest1d, (Tensor self, Ints size, Tensor out),
    { out.copy_(at::upsample_nearest1d(upcast(self), size)); })
OP(aclnnUpsampleNearest2d, (Tensor self, Ints size, Tensor out),
    { out.copy_(at::upsample_nearest2d(upcast(self), size)); })
OP(aclnnUpsampleNearest1dV2, (Tensor self, Ints size, float w, Tensor out),
    { out.copy_(at::upsample_nearest1d(upcast(self), size, scale(w))); })
UPSAMPLE_1D_GRADIENT(Nearest1d, upsample_nearest1d)
OP(aclnnUpsampleNearest2dV2, (Tensor self, Ints size, float h, float w, Tensor out),
    { out.copy_(at::upsample_nearest2d(upcast(self), size, scale(h), scale(w))); })
UPSAMPLE_2D_GRADIENT(Nearest2d, upsample_nearest2d)
UPSAMPLE_3D(Nearest3d, upsample_nearest3d)
UPSAMPLE_1D(NearestExact1d, _upsample_nearest_exact1d)
UPSAMPLE_1D_GRADIENT(NearestExact1d, _upsample_nearest_exact1d)
UPSAMPLE_2D(NearestExact2d, _upsample_nearest_exact2d)
UPSAMPLE_2D_GRADIENT(NearestExact2d, _upsample_nearest_exact2d)
UPSAMPLE_3D(NearestExact3d, _upsample_nearest_exact3d)
OP(aclnnUpsampleLinear1d, (Tensor self, Ints size, bool align, double w, Tensor out),
    { out.copy_(at::upsample_linear1d(upcast(self), size, align, scale(w))); })
OP(aclnnUpsampleLinear1dBackward,
    (Tensor grad, Ints size, Ints input, bool align, double w, Tensor out),
    { out.copy_(at::upsample_linear1d_backward(upcast(grad), size, input, align, scale(w))); })
ALIGNED_2D(Bilinear2d, upsample_bilinear2d)
ALIGNED_2D_GRADIENT(Bilinear2dBackward, upsample_bilinear2d)
ALIGNED_2D_GRADIENT(Bilinear2dBackwardV2, upsample_bilinear2d)
ALIGNED_2D(Bilinear2dAA, _upsample_bilinear2d_aa)
ALIGNED_2D_GRADIENT(Bilinear2dAABackward, _upsample_bilinear2d_aa)
ALIGNED_2D(Bicubic2d, upsample_bicubic2d)
ALIGNED_2D_GRADIENT(Bicubic2dBackward, upsample_bicubic2d)
ALIGNED_2D(Bicubic2dAA, _upsample_bicubic2d_aa)
ALIGNED_2D_GRADIENT(Bicubic2dAAGrad, _upsample_bicubic2d_aa)
OP(aclnnUpsampleTrilinear3d,
    (Tensor self, Ints size, bool align, double d, double h, double w, Tensor out), {
      out.copy_(at::upsample_trilinear3d(upcast(self), size, align, scale(d), scale(h), scale(w)));
    })
OP(aclnnUpsampleTrilinear3dBackward,
    (Tensor grad, Ints size, Ints input, bool align, double d, double h, double w, Tensor out), {
      out.copy_(at::upsample_trilinear3d_backward(
          upcast(grad), size, input, align, scale(d), scale(h), scale(w)));
    })

#define GRID(NAME, FUNCTION)                                                                      \
  OP(aclnn##NAME,                                                                                 \
      (Tensor self, Tensor grid, int64_t interpolation, int64_t padding, bool align, Tensor out), \
      { out.copy_(at::FUNCTION(upcast(self), upcast(grid), interpolation, padding, align)); })    \
  OP(aclnn##NAME##Backward,                                                                       \
      (Tensor grad, Tensor self, Tensor grid, int64_t interpolation, int64_t padding, bool align, \
          Bools mask, Opt<Tensor> grad_self, Opt<Tensor> grad_grid),                              \
      {                                                                                           \
        const auto [x, g] = at::FUNCTION##_backward(upcast(grad), upcast(self), upcast(grid),     \
            interpolation, padding, align, {mask[0], mask[1]});                                   \
        copy_if_given(grad_self, x);                                                              \
        copy_if_given(grad_grid, g);                                                              \
      })
GRID(GridSampler2D, grid_sampler_2d)
GRID(GridSampler3D, grid_sampler_3d)
OP(aclnnAffineGrid, (Tensor theta, Ints size, bool align, Tensor out),
    { out.copy_(at::affine_grid_generator(upcast(theta), size, align)); })

namespace {
// A3 refuses negative padding in float32, and takes it in float16, in PyTorch's tests
// (Ascend/pytorch, ci-test, disabled_testcases.json: aclnnReflectionPad2d).
void not_negative(const Tensor& self, const Ints& padding) {
  require(self.scalar_type() != at::kFloat ||
              std::all_of(padding.begin(), padding.end(), [](int64_t each) { return each >= 0; }),
      "padding is ", at::IntArrayRef(padding), "; it must not be negative in Float");
}
}  // namespace

#define PAD(NAME, FUNCTION)                                                                 \
  SHAPED(aclnn##NAME, (Tensor self, Ints padding, Tensor out), not_negative(self, padding), \
      { out.copy_(at::FUNCTION(upcast(self), padding)); })                                  \
  OP(aclnn##NAME##Backward, (Tensor grad, Tensor self, Ints padding, Tensor out),           \
      { out.copy_(at::FUNCTION##_backward(upcast(grad), upcast(self), padding)); })
PAD(ReflectionPad1d, reflection_pad1d)
PAD(ReflectionPad2d, reflection_pad2d)
PAD(ReflectionPad3d, reflection_pad3d)
PAD(ReplicationPad1d, replication_pad1d)
PAD(ReplicationPad2d, replication_pad2d)
PAD(ReplicationPad3d, replication_pad3d)
