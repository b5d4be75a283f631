// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#pragma once
#include <atomic>
#include <cstdint>

#include "process.h"

namespace emu {

// Stands for an NPU's id: host memory that devices may access (aclrtHostRegister).
constexpr int kNoNpu = -1;

// Allocations and reserved address ranges of this process are numbered from 1. `freed` counts those
// that ended, and mappings.
struct MemoryEvents {
  std::atomic<uint64_t> allocated{0}, freed{0};
};
inline MemoryEvents& memory_events() { return process.part<MemoryEvents>(); }

}  // namespace emu
