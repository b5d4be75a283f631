// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "names.h"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <set>
#include <sstream>

#include "registry.h"
#include "status.h"

namespace emu::names {
namespace {

// ASCEND_EMULATOR_CUSTOM: operators of the user's own (operators.py).
const std::set<std::string>& custom() {
  static const auto* const all = [] {
    const auto listed = split("ASCEND_EMULATOR_CUSTOM", ',');
    return new std::set<std::string>(listed.begin(), listed.end());
  }();
  return *all;
}

// Least number of letters to insert, remove or replace, whatever the case.
size_t distance(const std::string& from, const std::string& to) {
  std::vector<size_t> row(to.size() + 1);
  for (size_t j = 0; j < row.size(); ++j) row[j] = j;
  for (size_t i = 0; i < from.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < to.size(); ++j) {
      const bool same = std::tolower(from[i]) == std::tolower(to[j]);
      const size_t replaced = diagonal + !same;
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

std::string without_suffix(const std::string& name) {
  constexpr std::string_view suffix = "GetWorkspaceSize";
  return name.ends_with(suffix) ? name.substr(0, name.size() - suffix.size()) : name;
}

}  // namespace

bool emulated(const std::string& name) {
  return registered(name.c_str()) || custom().count(name) != 0;
}

bool callable(const std::string& name) {
  if (emulated(name)) return true;
  // Names that are refused have a function of this library (cann_names.stubs).
  Dl_info own{}, its{};
  void* const found = dlsym(RTLD_DEFAULT, name.c_str());
  return found && name == without_suffix(name) && dladdr(found, &its) != 0 &&
         dladdr(reinterpret_cast<void*>(&callable), &own) != 0 && its.dli_fbase == own.dli_fbase;
}

std::string hint_of(const std::string& name, const std::vector<std::string>& known) {
  const auto wanted = without_suffix(name);
  const std::string* best = nullptr;
  size_t least = std::max<size_t>(wanted.size() / 4, 2) + 1;
  for (const auto& each : known) {
    if (each.size() > wanted.size() + least || wanted.size() > each.size() + least) continue;
    const auto own = distance(wanted, each);
    if (own >= least) continue;
    least = own;
    best = &each;
  }
  return best ? text("; did you mean ", *best, "?") : "";
}

std::string hint(const std::string& name, const std::vector<std::string>& others) {
  auto known = registered_names();
  known.insert(known.end(), custom().begin(), custom().end());
  known.insert(known.end(), others.begin(), others.end());
  return hint_of(name, known);
}

}  // namespace emu::names
