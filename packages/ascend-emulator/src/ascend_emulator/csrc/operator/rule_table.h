// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Rules of operators as data. rules.py generates the tables from the TOML files beside the
// operators' sources, into the file of stubs.
#pragma once

#include <cstdint>

#include "core/rules.h"

namespace emu {

enum class Subject : uint8_t {
  chip,
  given,
  dtype,
  contiguous,
  shape,
  rank,
  elements,
  size,
  value,
  text
};
enum class Predicate : uint8_t { one_of, range, multiple, same };

// One comparison of a rule. A condition decides whether the clauses behind it apply, up to the
// first that is not a condition.
struct Clause {
  uint16_t rule;
  bool condition;
  Subject subject;
  Predicate predicate;
  const char *argument, *label;  // parameter in the source, and its name in torch_npu
  int8_t dim;
  Subject other_subject;  // of `same`, and the following
  const char *other, *other_label;
  int8_t other_dim;
  uint8_t count;
  int64_t values[9];  // allowed ones (of a text, numbers in rule_texts), the least and the most,
                      // or a divisor
};

struct OperatorRules {
  const char* name;
  const Clause *first, *last;
};

// The last entry of each has no name.
extern const OperatorRules operator_rules[];
extern const char* const chip_families[];
extern const char* const rule_texts[];

}  // namespace emu
