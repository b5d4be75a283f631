// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// ASCEND_EMULATOR_NUMERICS=jitter:SEED: results that depend on the order of a sum or on the
// approximation of a function differ, so that a tolerance that only one implementation meets is
// found. Operators' results move (operator/jitter.h), and collectives add in another order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emu::jitter {

extern const bool on;

uint64_t seed();

// Order in which a collective adds the values of its ranks, the same on each of them.
std::vector<size_t> order_of(size_t ranks);

}  // namespace emu::jitter
