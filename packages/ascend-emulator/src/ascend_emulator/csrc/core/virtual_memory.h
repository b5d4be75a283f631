// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Reserved address ranges, and physical memory mapped into them.
#pragma once
#include <utility>

#include "memory_events.h"

namespace emu::virtual_memory {

constexpr uint64_t kPage = 2u << 20;  // granularity of sizes and addresses

// Sets the managed address range, and the distance to the kernels' view.
void initialize(uintptr_t base, uint64_t bytes, intptr_t to_kernel);

void* reserve(uint64_t bytes);
void release(void* start);

struct Window {
  uint64_t bytes;
  int npu;   // kNoNpu: host memory, mapped at the address itself
  int file;  // -1: this process's arena
  uint64_t offset;
};
void map(void* at, const Window& window);
void unmap(void* at);
// The mapping that holds the address, and its start; of 0 bytes outside.
std::pair<uintptr_t, Window> window_at(const void* address);

// Contiguously mapped bytes of one NPU from the address on; looks no further than `wanted` bytes.
struct Mapped {
  uint64_t bytes = 0;
  int npu = kNoNpu;
  uint64_t range = 0;  // number of the address range (MemoryEvents)
};
Mapped at(const void* address, uint64_t wanted);

}  // namespace emu::virtual_memory
