// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "host_memory.h"

#include <cstdlib>
#include <map>
#include <shared_mutex>

#include "host_access.h"
#include "memory_events.h"
#include "status.h"

namespace emu::host_memory {
namespace {
struct Range {
  uint64_t bytes;
  bool for_devices = false;
};
using Ranges = std::map<uintptr_t, Range>;
struct HostMemory {
  std::shared_mutex mutex;
  Ranges allocated, registered;
};
HostMemory& memory() { return process.part<HostMemory>(); }

uint64_t bytes_from(const Ranges& ranges, const void* address, bool for_devices) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto range = ranges.upper_bound(at);
  if (range == ranges.begin()) return 0;
  --range;
  const uintptr_t end = range->first + range->second.bytes;
  return end > at && (!for_devices || range->second.for_devices) ? end - at : 0;
}
constexpr uint64_t kPage = 4096;
}  // namespace

void* allocate(uint64_t bytes) {
  void* address = bytes + kPage > bytes
                      ? std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage)
                      : nullptr;
  check(address != nullptr, kOutOfMemory, "no host memory for ", bytes, " bytes");
  std::lock_guard lock(memory().mutex);
  memory().allocated[reinterpret_cast<uintptr_t>(address)] = {bytes};
  return address;
}

void release(void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  {
    std::lock_guard lock(memory().mutex);
    const auto found = memory().allocated.find(at);
    check(found != memory().allocated.end(), kInvalidParam,
        "not memory of aclrtMallocHost: ", address);
    host_access::forget(at, found->second.bytes);
    memory().allocated.erase(found);
    ++memory_events().freed;
  }
  std::free(address);
}

void register_range(void* address, uint64_t bytes, bool for_devices) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  // Pinned memory without device access needs no alignment (torch_npu's test_npurt.py,
  // test_npurt_register_only_pinned).
  check(at && bytes && (!for_devices || at % kPage == 0), kInvalidParam, bytes, " bytes at ",
      address, "; for devices the address must be a multiple of ", kPage);
  std::lock_guard lock(memory().mutex);
  check(bytes_from(memory().registered, address, false) == 0, kInvalidParam,
      "registered already: ", address);
  memory().registered[at] = {bytes, for_devices};
}

void unregister(void* address) {
  std::lock_guard lock(memory().mutex);
  check(memory().registered.erase(reinterpret_cast<uintptr_t>(address)), kInvalidParam,
      "not registered: ", address);
}

bool allocated(const void* address) {
  std::shared_lock lock(memory().mutex);
  return bytes_from(memory().allocated, address, false) != 0;
}

uint64_t pinned(const void* address) {
  std::shared_lock lock(memory().mutex);
  const uint64_t bytes = bytes_from(memory().allocated, address, false);
  return bytes ? bytes : bytes_from(memory().registered, address, false);
}

uint64_t mapped(const void* address) {
  std::shared_lock lock(memory().mutex);
  return bytes_from(memory().registered, address, true);
}

}  // namespace emu::host_memory
