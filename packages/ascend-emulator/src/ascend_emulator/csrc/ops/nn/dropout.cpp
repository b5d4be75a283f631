// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Dropout in two steps as in torch_npu: a mask of one bit per value, rounded up to 128 bits, and
// its application (op-plugin's NativeDropoutKernelNpuOpApi.cpp). A set bit keeps the value.
#include "operator/shapes.h"
#include "ops/random.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

Tensor bit_values() { return at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte); }

void draw(const Tensor& mask, double p, const at::Generator& generator) {
  const auto kept = at::empty({mask.numel(), 8}, at::kByte).bernoulli_(1 - p, generator);
  mask.copy_((kept * bit_values()).sum(1, false, at::kByte).view(mask.sizes()));
}

void apply(const Tensor& self, const Tensor& mask, double p, const Tensor& out) {
  const auto kept = mask.contiguous()
                        .view({-1, 1})
                        .bitwise_and(bit_values())
                        .ne(0)
                        .view(-1)
                        .narrow(0, 0, self.numel())
                        .view(self.sizes());
  out.copy_(at::where(kept, upcast(self) / (1 - p), 0));
}

void check_mask(const Tensor& mask, const Tensor& self) {
  one_of("mask", mask, {at::kByte});
  require(mask.numel() * 8 >= self.numel(), "the mask has ", mask.numel() * 8, " bits for ",
      self.numel(), " values");
}
}  // namespace

OP(aclnnDropoutGenMask, (Ints, double p, int64_t seed, int64_t offset, Tensor mask),
    { draw(mask, p, generator(seed, offset)); })
// The unnamed parameter is the dtype of the probability.
OP(aclnnDropoutGenMaskV2, (Ints, double p, int64_t seed, int64_t offset, int32_t, Tensor mask),
    { draw(mask, p, generator(seed, offset)); })
OP(aclnnDropoutGenMaskV2Tensor, (Ints, double p, GraphState state, int32_t, Tensor mask),
    { draw(mask, p, state.generator()); })
// A3 refuses the bool mask of native_dropout_backward in PyTorch's tests (Ascend/pytorch, ci-test,
// disabled_testcases.json: aclnnDropoutDoMask).
SHAPED(aclnnDropoutDoMask, (Tensor self, Tensor mask, double p, Tensor out),
    (check_mask(mask, self), SAME(out, self)), { apply(self, mask, p, out); })
// Both steps in one, on Ascend950.
CHECKED(aclnnDropoutV3,
    (Tensor self, Opt<Tensor> noise_shape, double p, int64_t seed, int64_t offset, Tensor out,
        Tensor mask),
    {
      one_of("input", self, kFloating);
      require(!noise_shape, "optionalNoiseShape is given; only None is allowed");
      require(p >= 0 && p <= 1, "p is ", p, "; allowed: 0 to 1");
      check_mask(mask, self);
      SAME(out, self);
      COMPUTE {
        draw(mask, p, generator(seed, offset));
        apply(self, mask, p, out);
      };
    })
