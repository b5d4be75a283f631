// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Laws of modelled times: how long an operator, a copy or a collective takes on the chip. Laws,
// their constants and the operators of each are in laws.toml, and come by ASCEND_EMULATOR_LAWS.
#pragma once
#include <string>
#include <vector>

#include "task.h"

namespace emu::laws {

struct Law {
  std::string name;
  double start_us, rows_us, bandwidth, rate;
  double seconds(double bytes, double flops, double rows) const;
};

struct CollectiveLaw {
  std::string name;
  double start_us, rank_us, step_us, step_bytes, bandwidth;
  double seconds(double sent, int ranks) const;
};

// What an operator takes: the longest of its laws.
struct Rule {
  std::vector<std::string> names, dtypes;  // patterns; dtypes of the first tensor, empty: all
  std::vector<const Law*> laws;
  std::vector<const CollectiveLaw*> collectives;
  const Law* int8 = nullptr;  // instead, of int8 matrices
  bool logits = false;        // what moves is the first tensor in 32 bits
  bool ai_cpu() const;
};

// Of an operator with this dtype of its first tensor; null if it has no law.
const Rule* rule_of(const char* name, const std::string& dtype);
// Throws if there is no such law.
const Law& law(const std::string& name);

struct Modelled {
  double seconds = 0;
  std::string law{};  // empty: none, and the time is that of "elementwise"
};
// `instead` is a law that the operator chose while it computed, or null.
Modelled modelled(Kind kind, const Work& work, const char* instead);

}  // namespace emu::laws
