// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "virtual_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <shared_mutex>

#include "arena.h"
#include "status.h"

namespace emu::virtual_memory {
namespace {
struct Range {
  uint64_t bytes, number;
};
struct Addresses {
  std::shared_mutex mutex;
  std::map<uintptr_t, uint64_t> free;
  std::map<uintptr_t, Range> reserved;
  std::map<uintptr_t, Window> windows;
  intptr_t to_kernel = 0;
};
Addresses& addresses() { return process.part<Addresses>(); }

template <class Map>
auto holding(Map& map, uintptr_t address) {  // the last entry that starts at or before the address
  auto found = map.upper_bound(address);
  return found == map.begin() ? map.end() : std::prev(found);
}
}  // namespace

void initialize(uintptr_t base, uint64_t bytes, intptr_t to_kernel) {
  auto& all = addresses();
  const uintptr_t first = (base + kPage - 1) / kPage * kPage;
  all.free[first] = (base + bytes - first) / kPage * kPage;
  all.to_kernel = to_kernel;
}

void* reserve(uint64_t bytes) {
  auto& all = addresses();
  bytes = std::max<uint64_t>((bytes + kPage - 1) / kPage * kPage, kPage);
  std::lock_guard lock(all.mutex);
  for (auto range = all.free.begin(); range != all.free.end(); ++range) {
    if (range->second < bytes) continue;
    const auto [start, size] = *range;
    all.free.erase(range);
    if (size > bytes) all.free[start + bytes] = size - bytes;
    all.reserved[start] = {bytes, ++memory_events().allocated};
    return reinterpret_cast<void*>(start);
  }
  raise(kOutOfMemory, {"no ", bytes, " bytes of address space are left"});
}

void release(void* start) {
  auto& all = addresses();
  std::lock_guard lock(all.mutex);
  const auto range = all.reserved.find(reinterpret_cast<uintptr_t>(start));
  check(range != all.reserved.end(), kInvalidParam, "no address range was reserved at ", start);
  const auto window = all.windows.lower_bound(range->first);
  check(window == all.windows.end() || window->first >= range->first + range->second.bytes,
      kInvalidParam, "the address range at ", start, " still has memory mapped at ",
      window == all.windows.end() ? nullptr : reinterpret_cast<void*>(window->first));
  auto freed = all.free.emplace(range->first, range->second.bytes).first;
  all.reserved.erase(range);
  ++memory_events().freed;
  if (auto next = std::next(freed);
      next != all.free.end() && freed->first + freed->second == next->first) {
    freed->second += next->second;
    all.free.erase(next);
  }
  if (freed == all.free.begin()) return;
  if (auto previous = std::prev(freed); previous->first + previous->second == freed->first) {
    previous->second += freed->second;
    all.free.erase(freed);
  }
}

void map(void* at, const Window& window) {
  auto& all = addresses();
  const auto start = reinterpret_cast<uintptr_t>(at);
  check(start % kPage == 0 && window.bytes % kPage == 0, kInvalidParam, window.bytes, " bytes at ",
      at, "; both must be multiples of ", kPage);
  std::lock_guard lock(all.mutex);
  const auto range = holding(all.reserved, start);
  check(range != all.reserved.end() && start + window.bytes <= range->first + range->second.bytes,
      kInvalidParam, window.bytes, " bytes at ", at, " are not in one reserved address range");
  const auto other = holding(all.windows, start + window.bytes - 1);
  check(other == all.windows.end() || other->first + other->second.bytes <= start, kInvalidParam,
      "memory is mapped already at ",
      reinterpret_cast<void*>(other == all.windows.end() ? 0 : other->first));
  void* view = reinterpret_cast<void*>(window.npu == kNoNpu ? start : start + all.to_kernel);
  if (window.file < 0) {
    arena::map(view, window.offset, window.bytes);
  } else {
    arena::map(view, window.file, window.offset, window.bytes);
  }
  all.windows[start] = window;
}

void unmap(void* at) {
  auto& all = addresses();
  const auto start = reinterpret_cast<uintptr_t>(at);
  std::lock_guard lock(all.mutex);
  const auto window = all.windows.find(start);
  check(window != all.windows.end(), kInvalidParam, "no memory is mapped at ", at);
  if (window->second.npu == kNoNpu) {
    mmap(at, window->second.bytes, PROT_NONE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  } else {
    // Replaced by private memory, so that a running kernel does not crash the process; new accesses
    // are refused.
    arena::unmap(reinterpret_cast<void*>(start + all.to_kernel), window->second.bytes);
  }
  all.windows.erase(window);
  ++memory_events().freed;
}

std::pair<uintptr_t, Window> window_at(const void* address) {
  auto& all = addresses();
  std::shared_lock lock(all.mutex);
  const auto start = reinterpret_cast<uintptr_t>(address);
  const auto window = holding(all.windows, start);
  if (window == all.windows.end() || window->first + window->second.bytes <= start) return {};
  return *window;
}

Mapped at(const void* address, uint64_t wanted) {
  auto& all = addresses();
  const auto start = reinterpret_cast<uintptr_t>(address);
  std::shared_lock lock(all.mutex);
  auto window = holding(all.windows, start);
  if (window == all.windows.end()) return {};
  const int npu = window->second.npu;
  uintptr_t end = window->first + window->second.bytes;
  if (end <= start) return {};
  for (++window; end - start < wanted && window != all.windows.end() && window->first == end &&
                 window->second.npu == npu;
      ++window)
    end += window->second.bytes;
  return {end - start, npu, holding(all.reserved, start)->second.number};
}

}  // namespace emu::virtual_memory
