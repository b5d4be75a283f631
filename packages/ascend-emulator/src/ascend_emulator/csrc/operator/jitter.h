// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Results of operators under core/jitter.h: each moves by at most one unit in the last place.
//
// The direction is a hash of seed, operator, position and value. As on an NPU, the same operator
// with the same arguments therefore gives the same bits on each rank, in each run and when a graph
// is replayed.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace emu::jitter {

// Moves the results among the tensors of an operator that was executed. `ends` has the number of
// tensors up to and including each of the parameters.
void move_results(const char* name, const char* parameters, at::ArrayRef<uint16_t> ends,
    const std::vector<at::Tensor>& tensors);

}  // namespace emu::jitter
