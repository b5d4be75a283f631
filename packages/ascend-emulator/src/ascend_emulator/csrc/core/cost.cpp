// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "cost.h"

#include <algorithm>
#include <utility>

namespace emu::cost {
namespace {

thread_local Counters* counters = nullptr;

}  // namespace

Counters* current() { return counters; }

Scope::Scope(Counters* mine) : before_(std::exchange(counters, mine)) {}
Scope::~Scope() { counters = before_; }

void partial_access(const void* argument, size_t size, double bytes) {
  if (!counters) return;
  std::lock_guard lock(counters->mutex);
  if (std::find(counters->parts.begin(), counters->parts.end(), argument) ==
      counters->parts.end()) {
    counters->parts.push_back(argument);
    counters->bytes -= static_cast<double>(size);
  }
  counters->bytes += bytes;
}

void by_law(const char* law, double uncounted) {
  if (!counters) return;
  std::lock_guard lock(counters->mutex);
  counters->law = law;
  counters->uncounted += uncounted;
}

void add_sent(double bytes, int ranks) {
  if (!counters) return;
  std::lock_guard lock(counters->mutex);
  counters->link += bytes;
  counters->ranks = ranks;
}

void add_flops(double flops, int item) {
  if (!counters) return;
  std::lock_guard lock(counters->mutex);
  counters->flops += flops;
  counters->item = item;
}

}  // namespace emu::cost
