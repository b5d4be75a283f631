// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Accesses of the host that are mistakes, found by protected pages: to device memory, which ends
// the process; and, with ASCEND_EMULATOR_RACES, to pinned memory whose copy has not run yet, after
// which the program goes on. Each is reported in one line with the line of Python.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace emu::host_access {

// Puts the handler of SIGSEGV in front of those that were installed since, such as that of Python's
// faulthandler, which gets what it does not explain. Called where memory is allocated.
void watch();
struct Owner {
  uintptr_t first;
  uint64_t bytes;  // 0: nothing is allocated there
  int npu;
};
// Memory that the addresses belong to: the allocation of an NPU, and whether it is page-locked.
struct Memory {
  Owner (*owner)(const void* address);
  bool (*page_locked)(const void* address);
};
// The reservation of device addresses, once.
void reserved(uintptr_t base, uint64_t bytes, const Memory& memory);

// Pinned memory that a copy writes, or reads.
struct Range {
  uintptr_t first;
  uint64_t bytes;
  bool written;
  int npu;
};
bool races();  // ASCEND_EMULATOR_RACES

// From when a copy is queued until it has run, or was dropped.
class Guard {
 public:
  explicit Guard(const Range& range);
  ~Guard();
  Guard(const Guard&) = delete;
  void begin();  // the copy runs

 private:
  void* pending_ = nullptr;
};
using Guards = std::vector<std::shared_ptr<Guard>>;
Guards guards(const std::vector<Range>& ranges);

// The memory is about to be freed.
void forget(uintptr_t first, uint64_t bytes);

}  // namespace emu::host_access
