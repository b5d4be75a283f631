// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "jitter.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "hash.h"

namespace emu::jitter {
namespace {
// What follows "jitter:", or null.
const char* chosen() {
  constexpr char kName[] = "jitter:";
  const char* list = std::getenv("ASCEND_EMULATOR_NUMERICS");
  const char* item = list ? std::strstr(list, kName) : nullptr;
  return item ? item + std::strlen(kName) : nullptr;
}
}  // namespace

const bool on = chosen() != nullptr;

uint64_t seed() {
  static const uint64_t value = on ? std::strtoull(chosen(), nullptr, 10) : 0;
  return value;
}

std::vector<size_t> order_of(size_t ranks) {
  std::vector<size_t> order(ranks);
  std::iota(order.begin(), order.end(), 0);
  if (on)
    std::sort(order.begin(), order.end(),
        [](size_t a, size_t b) { return hash(seed(), {a}) < hash(seed(), {b}); });
  return order;
}

}  // namespace emu::jitter
