// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// What a device knows of its allocations: how much is left, what was never freed, what an address
// belongs to.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <utility>

#include "device.h"
#include "status.h"

namespace emu {
namespace {
double gib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }
}  // namespace

void Device::refuse(uint64_t bytes, const char* why) {
  // torch_npu's error has no message of CANN's. It frees what it caches, and asks again.
  if (std::exchange(refused_, bytes) == bytes && !std::exchange(told_, true))
    fprintf(stderr,
        "ascend-emulator: NPU %d is out of memory: %.2f GiB asked for, %.2f of %.2f GiB free%s; "
        "fix: ascend-emulator run --memory SIZE, or pytest --npu-memory SIZE, with more\n",
        id, gib(bytes), gib(capacity_ - used_), gib(capacity_), why);
  raise(kOutOfMemory, {"out of memory on NPU ", id, ": asked for ", bytes, " bytes, ",
                          capacity_ - used_, " of ", capacity_, " free", why});
}

void Device::count(uint64_t bytes) {
  if (bytes > capacity_ - used_) refuse(bytes);
  used_ += bytes;
  most_ = std::max(most_, used_);
}

std::string Device::leaks() {
  std::lock_guard lock(mutex_);
  std::map<uint64_t, uint64_t, std::greater<>> sizes(physical_.begin(), physical_.end());
  for (const auto& [address, block] : live_) ++sizes[block.bytes];
  if (sizes.empty()) return "";
  uint64_t count = 0, total = 0;
  std::string largest;
  int listed = 0;
  for (const auto& [bytes, times] : sizes) {
    count += times;
    total += bytes * times;
    if (++listed <= 8) largest += text(listed == 1 ? "" : ", ", times, " x ", bytes);
  }
  return text("NPU ", id, ": ", count, " allocations of ", total,
      " bytes were never freed: ", largest, listed > 8 ? ", ..." : "");
}

uint64_t Device::bytes_from(const void* address, uint64_t* allocation) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(mutex_);
  auto block = live_.upper_bound(at);
  if (block == live_.begin()) return 0;
  --block;
  const auto end = block->first + block->second.bytes;
  if (allocation) *allocation = block->second.allocation;
  return end > at ? end - at : 0;
}

std::pair<uintptr_t, uint64_t> Device::block(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(mutex_);
  auto block = live_.upper_bound(at);
  if (block == live_.begin() || (--block)->first + block->second.bytes <= at) return {0, 0};
  return {block->first, block->second.bytes};
}

Device::Usage Device::usage() {
  std::lock_guard lock(mutex_);
  return {used_, most_};
}

}  // namespace emu
