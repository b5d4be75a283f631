#include "registry.h"

#include <cstdlib>
#include <map>
#include <set>

namespace emu {
namespace {
struct Entry {
  State state;
  std::string family;
};

std::map<std::string, Entry>& entries() {
  static std::map<std::string, Entry> all;
  return all;
}

std::string stem(const std::string& path) {
  const auto start = path.find_last_of('/') + 1;
  return path.substr(start, path.find_last_of('.') - start);
}

const std::set<std::string>& removals() {
  static const std::set<std::string> names = [] {
    std::set<std::string> out;
    std::stringstream list(std::getenv("ASCEND_EMULATOR_WITHOUT") ? std::getenv("ASCEND_EMULATOR_WITHOUT") : "");
    for (std::string name; std::getline(list, name, ',');) out.insert(name);
    return out;
  }();
  return names;
}
}  // namespace

Registration::Registration(const char* name, State state, const char* file) {
  entries()[name] = {state, stem(file)};
}

bool removed(const char* name) {
  static const bool none = removals().empty();
  return !none && removals().count(name);
}

bool registered(const char* name) { return entries().count(name) != 0; }

}  // namespace emu

// One line per entry point: "name state family". Read by `ascend-emulator coverage`.
EXPORT const char* ascend_emulator_registry() {
  static const std::string listing = [] {
    std::string out;
    for (const auto& [name, entry] : emu::entries())
      out += name + (entry.state == emu::State::computed ? " computed " : " bookkeeping ") + entry.family + "\n";
    return out;
  }();
  return listing.c_str();
}
