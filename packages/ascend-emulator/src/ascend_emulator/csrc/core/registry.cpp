// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "registry.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>

#include "process.h"
#include "status.h"

namespace emu {
namespace {
struct Entry {
  Effect effect;
  std::string family;
};

struct Entries {
  std::map<std::string, Entry> all;
};
std::map<std::string, Entry>& entries() { return process.part<Entries>().all; }

std::string without_suffix(const std::string& file) {
  return file.substr(0, file.find_last_of('.'));
}

using Names = std::set<std::string, std::less<>>;
const Names& removals() {
  static const Names names = [] {
    Names out;
    // what the user disabled, and what the chip does not have (chips.toml)
    for (const char* variable : {"ASCEND_EMULATOR_WITHOUT", "ASCEND_EMULATOR_LACKS"})
      for (const auto& name : split(variable, ',')) out.insert(name);
    return out;
  }();
  return names;
}

// ASCEND_EMULATOR_CALLS
struct Calls {
  std::atomic<const char*> path{std::getenv("ASCEND_EMULATOR_CALLS")};
  std::mutex mutex;
  std::set<std::string> seen;
  int file = -1;
  bool opened = false;
};
}  // namespace

std::string nth(const char* list, int64_t n) {
  std::istringstream parts(list);
  std::string part;
  for (int64_t i = 0; i <= n; ++i) std::getline(parts, part, ',');
  const auto end = part.find_last_not_of(" )") + 1, start = part.find_last_of(" (", end - 1) + 1;
  return part.substr(start, end - start);
}

Registration::Registration(const char* name, Effect effect, const char* file) {
  entries()[name] = {effect, without_suffix(file)};
}

void note(const char* name) {
  auto& calls = process.part<Calls>();
  const char* path = calls.path.load(std::memory_order_relaxed);
  if (!path) return;
  std::lock_guard lock(calls.mutex);
  if (!calls.seen.insert(name).second) return;
  if (!std::exchange(calls.opened, true)) {
    calls.file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (calls.file < 0)
      fprintf(stderr, "ascend-emulator: cannot write ASCEND_EMULATOR_CALLS to %s: %s\n", path,
          std::strerror(errno));
  }
  const auto line = text(name, "\n");
  if (write(calls.file, line.data(), line.size()) < 0) calls.seen.erase(name);
}

bool removed(const char* name) {
  static const bool none = removals().empty();
  return !none && removals().count(std::string_view(name));
}

bool registered(const char* name) { return entries().count(name) != 0; }

std::vector<std::string> registered_names() {
  std::vector<std::string> names;
  for (const auto& [name, _] : entries()) names.push_back(name);
  return names;
}

std::vector<std::string> split(const char* variable, char separator) {
  const char* value = std::getenv(variable);
  std::stringstream list(value ? value : "");
  std::vector<std::string> parts;
  for (std::string part; std::getline(list, part, separator);) {
    const auto first = part.find_first_not_of(' '), last = part.find_last_not_of(' ');
    if (first != std::string::npos) parts.push_back(part.substr(first, last - first + 1));
  }
  return parts;
}

}  // namespace emu

// Sets ASCEND_EMULATOR_CALLS for this process from now on.
EXPORT void ascend_emulator_note_calls(const char* path) {
  auto& calls = emu::process.part<emu::Calls>();
  std::lock_guard lock(calls.mutex);
  calls.path = strdup(path);
  calls.seen.clear();
  calls.opened = false;
}

// One line per entry point: "name family effect reason". Read by `ascend-emulator coverage`.
EXPORT const char* ascend_emulator_registry() {
  static const std::string listing = [] {
    std::string out;
    for (const auto& [name, entry] : emu::entries())
      out +=
          emu::text(name, " ", entry.family, " ", entry.effect.name, " ", entry.effect.why, "\n");
    return out;
  }();
  return listing.c_str();
}
