// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "rules.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "core/process.h"
#include "rule_table.h"

namespace emu::rule_counts {
namespace {

struct Broken {
  std::mutex mutex;
  std::map<std::string, int> calls;  // by rule
};

std::string allowed() {
  const char* list = std::getenv("ASCEND_EMULATOR_ALLOW");
  return text(",", list ? list : "", ",");
}
bool is_allowed(const std::string& id) {
  return allowed().find(text(",", id, ",")) != std::string::npos;
}

// After torch_npu's clean-up, as report_leaks.
__attribute__((destructor)) void report() {
  if (process.forked() || allowed() == ",,") return;
  for (const auto& [id, count] : process.part<Broken>().calls)
    std::fprintf(stderr, "ascend-emulator: %d call%s broke rule %s, which is %s\n", count,
        count == 1 ? "" : "s", id.c_str(), is_allowed(id) ? "allowed" : "refused");
}

}  // namespace
}  // namespace emu::rule_counts

void emu::rule(const char* id, c10::function_ref<void()> check) {
  try {
    check();
  } catch (const Error& error) { broken(id, error); }
}

void emu::broken(const char* id, const Error& error) {
  const auto* known = rules;
  while (known->id && std::strcmp(known->id, id)) ++known;
  auto& state = process.part<rule_counts::Broken>();
  std::lock_guard lock(state.mutex);
  ++state.calls[id];
  if (rule_counts::is_allowed(id)) return;
  const auto* const basis = known->id ? known->basis : "in no table";
  throw Error(error.status,
      text(error.what(), " (rule ", id, ", ", basis, ": ", known->id ? known->source : "", ")"));
}
