// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "virtual_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <shared_mutex>

#include "arena.h"

namespace emu::virtual_memory {
namespace {
std::shared_mutex mutex;
struct Range {
  uint64_t bytes, number;
};
std::map<uintptr_t, uint64_t> free_ranges;
std::map<uintptr_t, Range> reserved;
std::map<uintptr_t, Window> windows;
intptr_t distance = 0;

template <class Map>
auto holding(Map& map, uintptr_t address) {  // the last entry that starts at or before the address
  auto found = map.upper_bound(address);
  return found == map.begin() ? map.end() : std::prev(found);
}
}  // namespace

void initialize(uintptr_t base, uint64_t bytes, intptr_t to_kernel) {
  const uintptr_t first = (base + kPage - 1) / kPage * kPage;
  free_ranges[first] = (base + bytes - first) / kPage * kPage;
  distance = to_kernel;
}

void* reserve(uint64_t bytes) {
  bytes = std::max<uint64_t>((bytes + kPage - 1) / kPage * kPage, kPage);
  std::lock_guard lock(mutex);
  for (auto range = free_ranges.begin(); range != free_ranges.end(); ++range) {
    if (range->second < bytes) continue;
    const auto [start, size] = *range;
    free_ranges.erase(range);
    if (size > bytes) free_ranges[start + bytes] = size - bytes;
    reserved[start] = {bytes, ++memory_events.allocated};
    return reinterpret_cast<void*>(start);
  }
  throw Error(kOutOfMemory, text("no ", bytes, " bytes of address space are left"));
}

void release(void* start) {
  std::lock_guard lock(mutex);
  const auto range = reserved.find(reinterpret_cast<uintptr_t>(start));
  check(range != reserved.end(), kInvalidParam, "no address range was reserved at ", start);
  const auto window = windows.lower_bound(range->first);
  check(window == windows.end() || window->first >= range->first + range->second.bytes,
      kInvalidParam, "the address range at ", start, " still has memory mapped at ",
      window == windows.end() ? nullptr : reinterpret_cast<void*>(window->first));
  auto freed = free_ranges.emplace(range->first, range->second.bytes).first;
  reserved.erase(range);
  ++memory_events.freed;
  if (auto next = std::next(freed);
      next != free_ranges.end() && freed->first + freed->second == next->first) {
    freed->second += next->second;
    free_ranges.erase(next);
  }
  if (freed == free_ranges.begin()) return;
  if (auto previous = std::prev(freed); previous->first + previous->second == freed->first) {
    previous->second += freed->second;
    free_ranges.erase(freed);
  }
}

void map(void* at, const Window& window) {
  const auto start = reinterpret_cast<uintptr_t>(at);
  check(start % kPage == 0 && window.bytes % kPage == 0, kInvalidParam, window.bytes, " bytes at ",
      at, "; both must be multiples of ", kPage);
  std::lock_guard lock(mutex);
  const auto range = holding(reserved, start);
  check(range != reserved.end() && start + window.bytes <= range->first + range->second.bytes,
      kInvalidParam, window.bytes, " bytes at ", at, " are not in one reserved address range");
  const auto other = holding(windows, start + window.bytes - 1);
  check(other == windows.end() || other->first + other->second.bytes <= start, kInvalidParam,
      "memory is mapped already at ",
      reinterpret_cast<void*>(other == windows.end() ? 0 : other->first));
  void* view = reinterpret_cast<void*>(window.npu == kNoNpu ? start : start + distance);
  if (window.file < 0) {
    arena::map(view, window.offset, window.bytes);
  } else {
    arena::map(view, window.file, window.offset, window.bytes);
  }
  windows[start] = window;
}

void unmap(void* at) {
  const auto start = reinterpret_cast<uintptr_t>(at);
  std::lock_guard lock(mutex);
  const auto window = windows.find(start);
  check(window != windows.end(), kInvalidParam, "no memory is mapped at ", at);
  if (window->second.npu == kNoNpu) {
    mmap(at, window->second.bytes, PROT_NONE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  } else {
    // Replaced by private memory, so that a running kernel does not crash the process; new accesses
    // are refused.
    arena::unmap(reinterpret_cast<void*>(start + distance), window->second.bytes);
  }
  windows.erase(window);
  ++memory_events.freed;
}

Mapped at(const void* address, uint64_t wanted) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  std::shared_lock lock(mutex);
  auto window = holding(windows, start);
  if (window == windows.end()) return {};
  const int npu = window->second.npu;
  uintptr_t end = window->first + window->second.bytes;
  if (end <= start) return {};
  for (++window; end - start < wanted && window != windows.end() && window->first == end &&
                 window->second.npu == npu;
      ++window)
    end += window->second.bytes;
  return {end - start, npu, holding(reserved, start)->second.number};
}

}  // namespace emu::virtual_memory
