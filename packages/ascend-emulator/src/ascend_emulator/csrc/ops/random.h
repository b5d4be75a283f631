// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Random numbers. They differ from an NPU's for the same seed, whose generator is not public, and
// are reproducible for the same (seed, offset).
#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include "operator/op.h"

namespace emu {

inline at::Generator generator(int64_t seed, int64_t offset) {
  // splitmix64's constant keeps neighbouring offsets apart.
  return at::detail::createCPUGenerator(
      static_cast<uint64_t>(seed) + static_cast<uint64_t>(offset) * 0x9E3779B97F4A7C15ull);
}

// The state of a generator in a call.
struct CallState {
  int64_t seed, offset;
  FIELDS(seed, offset)
  at::Generator generator() const { return emu::generator(seed, offset); }
};
// The state of a generator in a captured graph: tensors that are read at replay, and the call's own
// offset.
struct GraphState {
  Tensor seed, offset;
  int64_t within;
  FIELDS(seed, offset, within)
  at::Generator generator() const {
    return emu::generator(seed.item<int64_t>(), offset.item<int64_t>() + within);
  }
};

}  // namespace emu
