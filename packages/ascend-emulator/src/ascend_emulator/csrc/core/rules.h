// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Checks of the rules in the tables beside the sources (docs/emulator-rules.md).
#pragma once

#include "status.h"

namespace emu {

struct Rule {
  const char *id, *basis, *source;  // basis: "documented", "seen on hardware" or "inferred"
};
extern const Rule rules[];               // the last has no id
extern const char* const allowed_rules;  // by comma, of ASCEND_EMULATOR_ALLOW; null: none

// Adds the rule to the error and throws it, unless the rule is allowed (ASCEND_EMULATOR_ALLOW).
void broken(const char* rule, const Error& error);

// Runs a check of a rule that its table does not express.
void rule(const char* id, c10::function_ref<void()> check);

// A check of one condition, with the parts of the error's text.
template <class... Parts> [[gnu::always_inline]] inline void rule(
    const char* id, bool ok, const Printable& first, const Parts&... parts) {
  if (!ok) [[unlikely]]
    broken(id, Error(kOpParam, text(first, parts...)));
}

}  // namespace emu
