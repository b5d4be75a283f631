// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#pragma once
#include <cstdint>
#include <initializer_list>

namespace emu {

// Hash of a seed and the purpose (splitmix64), for choices that must not depend on thread timing,
// as a random sequence would.
inline uint64_t hash(uint64_t seed, std::initializer_list<uint64_t> parts) {
  for (uint64_t part : parts) {
    seed += 0x9e3779b97f4a7c15 + part;
    seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9;
    seed = (seed ^ (seed >> 27)) * 0x94d049bb133111eb;
    seed ^= seed >> 31;
  }
  return seed;
}

}  // namespace emu
