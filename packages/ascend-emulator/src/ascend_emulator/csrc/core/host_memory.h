// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Host memory known to the runtime: page-locked, or registered for access by devices.
#pragma once
#include <cstdint>

namespace emu::host_memory {

void* allocate(uint64_t bytes);  // page-locked (aclrtMallocHost)
void release(void* address);

void register_range(void* address, uint64_t bytes, bool for_devices);
void unregister(void* address);

bool allocated(const void* address);  // page-locked, by allocate()

// Bytes from the address to the end of the page-locked, or device-accessible, range; 0 outside.
uint64_t pinned(const void* address);
uint64_t mapped(const void* address);

}  // namespace emu::host_memory
