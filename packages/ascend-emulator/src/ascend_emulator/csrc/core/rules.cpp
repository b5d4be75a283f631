// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "rules.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>

#include "process.h"

// Read once: what has been checked is not checked again (ArgumentReader::key).
const char* const emu::allowed_rules = std::getenv("ASCEND_EMULATOR_ALLOW");

namespace emu::rule_counts {
namespace {

constexpr size_t kMostRules = 20;  // in the summary

struct Broken {
  std::mutex mutex;
  std::map<std::string, int> calls;  // by rule
};

bool is_allowed(const std::string& id) {
  return allowed_rules &&
         text(",", allowed_rules, ",").find(text(",", id, ",")) != std::string::npos;
}

// After torch_npu's clean-up, as report_leaks: one line, the most frequent rules first.
__attribute__((destructor)) void report() {
  const auto& calls = process.part<Broken>().calls;
  if (process.forked() || calls.empty()) return;
  std::multimap<int, std::string, std::greater<>> rules;
  for (const auto& [id, count] : calls)
    rules.emplace(count, text(id, is_allowed(id) ? " (allowed" : " (refused", " ", count, ")"));
  std::vector<std::string> shown;
  for (const auto& [count, rule] : rules)
    if (shown.size() < kMostRules) shown.push_back(rule);
  if (rules.size() > shown.size()) shown.push_back(text(rules.size() - shown.size(), " more"));
  std::fprintf(stderr, "ascend-emulator: rules broken: %s\n", listed(shown).c_str());
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
      text(error.what(), " (rule ", id, ", ", basis, ": ", known->id ? known->source : "", ")"),
      true);
}
