// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// An operator of a project in C++, and the torch extension that calls it as it would on an NPU, for
// test_operators.py.
#include <ATen/ops/add.h>
#include <ascend_emulator/operator.h>

ASCEND_EMULATOR_OPERATOR(aclnnAddCustom,
    (at::Tensor x, at::Tensor y, at::Scalar alpha, std::vector<int64_t> dims, at::Tensor out), {
      if (!dims.empty()) throw std::runtime_error("dims are not empty");
      at::add_out(out, x, y, alpha);
    })
