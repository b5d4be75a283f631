// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Structures of the memory calls: CANN's public API reference, "aclrtMemLocation",
// "aclrtPhysicalMemProp", "aclrtPtrAttributes", "aclrtMemcpyBatchAttr", "aclrtMemUceInfo",
// "aclrtMemUsageInfo".
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

enum LocationType : int32_t { kHost = 0, kDevice = 1, kUnregistered = 2, kHostNuma = 4 };
struct Location {
  uint32_t id;
  int32_t type;
};
struct PhysicalProperties {
  int32_t handle_type, allocation_type, attribute;
  Location location;
  uint64_t reserved;
};
struct PointerAttributes {
  Location location;
  uint32_t page_bytes, reserved[4];
};
struct BatchAttributes {
  Location to, from;
  uint8_t reserved[16];
};
struct FaultyRange {
  void* address;
  size_t bytes, reserved[14];
};
struct Usage {
  char name[32];
  uint64_t now, peak;
  size_t reserved[8];
};

// Unmaps and frees an NPU's physical memory that aclrtFreePhysical has not freed.
void free_physical_of(int npu);

}  // namespace emu
