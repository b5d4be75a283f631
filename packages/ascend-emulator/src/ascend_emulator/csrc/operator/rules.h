// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Checks of the rules in the tables beside the operators' sources (docs/emulator-rules.md).
#pragma once

#include "checks.h"

namespace emu {

// Adds the rule to the error and throws it, unless the rule is allowed (ASCEND_EMULATOR_ALLOW).
void broken(const char* rule, const Error& error);

// Runs a check of a rule that its table does not express.
template <class Check> void rule(const char* id, const Check& check) {
  try {
    check();
  } catch (const Error& error) { broken(id, error); }
}

}  // namespace emu
