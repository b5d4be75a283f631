// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Memory of a task's arguments is checked at the call, and again when the task runs: by then it may
// have been freed, and a captured task runs as often as its graph is replayed.
#pragma once
#include <c10/util/FunctionRef.h>

#include "device.h"

namespace emu {

class Recheck {
 public:
  // At the call, before its memory is checked.
  Recheck()
      : allocated_(memory_events().allocated.load()), verified_(memory_events().freed.load()) {}
  Recheck(const Recheck& other) : allocated_(other.allocated_), verified_(other.verified_.load()) {}

  // When the task runs: calls `check_all`, unless no memory was freed since the last time.
  void verify(c10::function_ref<void()> check_all) const {
    const uint64_t freed = memory_events().freed;
    if (freed == verified_.load(std::memory_order_relaxed)) return;
    check_all();
    verified_.store(freed, std::memory_order_relaxed);
  }
  // For `check_all`: throws unless the same allocations still hold these bytes. Address ranges
  // count, not what is mapped into them: sleep mode maps other physical memory at the same
  // addresses.
  void check(c10::function_ref<std::string()> what, const void* address, uint64_t bytes) const;
  void check(const char* what, const void* address, uint64_t bytes) const;

 private:
  uint64_t allocated_;  // number of the latest allocation at the call
  mutable std::atomic<uint64_t> verified_;
};

}  // namespace emu
