// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Pointwise operators of one tensor.
#include "families.h"

// PyTorch's test of _foreach_abs passes with bool on Atlas A3; ATen's CPU kernel has none.
SHAPED(aclnnAbs, (Tensor self, Tensor out), SAME(out, self), {
  if (self.scalar_type() == at::kBool) out.copy_(self);
  else at::abs_out(out, self);
})

OP(aclnnInplaceNanToNum, (Tensor self, float nan, float posinf, float neginf),
    { self.nan_to_num_(nan, posinf, neginf); })

OP(aclnnAngleV2, (Tensor self, Tensor out), { out.copy_(at::angle(upcast(self))); })
// A negative epsilon means none (op-plugin's LogitKernelNpuOpApi.cpp).
OP(aclnnLogit, (Tensor self, double epsilon, Tensor out),
    { out.copy_(at::logit(upcast(self), epsilon < 0 ? std::nullopt : Opt<double>(epsilon))); })
