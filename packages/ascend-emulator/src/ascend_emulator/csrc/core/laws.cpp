// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "laws.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>

#include "device.h"
#include "process.h"

namespace emu::laws {
namespace {

constexpr double kFullRows = 256;  // at which an operator's start is longest

std::vector<std::string> split(const std::string& words, char separator) {
  std::vector<std::string> out;
  std::stringstream stream(words == "-" ? "" : words);
  for (std::string word; std::getline(stream, word, separator);) out.push_back(word);
  return out;
}

// "AI CPU" of "AI_CPU".
std::string spaced(std::string name) {
  std::replace(name.begin(), name.end(), '_', ' ');
  return name;
}

// "Add" of "aclnnInplaceAddV3".
std::string stripped(std::string name) {
  for (const std::string part : {"aclnn", "atb::", "Atb", "Inplace"})
    if (name.rfind(part, 0) == 0 && name.size() > part.size()) name.erase(0, part.size());
  const auto version = name.find_last_not_of("0123456789");
  const bool versioned = version != std::string::npos && version + 1 < name.size();
  if (versioned && version > 0 && name[version] == 'V') name.erase(version);
  return name;
}

struct Table {
  std::deque<Law> laws;
  std::deque<CollectiveLaw> collectives;
  std::deque<Rule> rules;
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, const Rule*> known;

  Table() {
    const char* given = std::getenv("ASCEND_EMULATOR_LAWS");
    std::stringstream lines(given ? given : "");
    for (std::string line; std::getline(lines, line);) {
      std::stringstream words(line);
      std::string what, name;
      words >> what >> name;
      if (what == "law") {
        auto& law = laws.emplace_back(Law{spaced(name), 0, 0, 1, 1});
        words >> law.start_us >> law.rows_us >> law.bandwidth >> law.rate;
      } else if (what == "collective") {
        auto& law = collectives.emplace_back(CollectiveLaw{spaced(name), 0, 0, 0, 0, 1});
        words >> law.start_us >> law.rank_us >> law.step_us >> law.step_bytes >> law.bandwidth;
      } else {
        add_rule(name, words);
      }
    }
  }

  void add_rule(const std::string& names, std::stringstream& words) {
    std::string int8, dtypes, moved;
    words >> int8 >> dtypes >> moved;
    auto& rule = rules.emplace_back();
    for (const auto& each : split(names, ',')) {
      if (const auto* law = find(laws, spaced(each))) rule.laws.push_back(law);
      if (const auto* law = find(collectives, spaced(each))) rule.collectives.push_back(law);
    }
    rule.int8 = find(laws, spaced(int8));
    rule.dtypes = split(dtypes, ',');
    rule.logits = moved == "logits";
    for (std::string pattern; words >> pattern;) rule.names.push_back(pattern);
  }

  template <class All>
  const typename All::value_type* find(const All& all, const std::string& name) const {
    const auto at =
        std::find_if(all.begin(), all.end(), [&](const auto& each) { return each.name == name; });
    return at == all.end() ? nullptr : &*at;
  }

  const Rule* lookup(const char* name, const std::string& dtype) const {
    const auto plain = stripped(name);
    const auto matches = [&](const std::string& pattern) {
      return fnmatch(pattern.c_str(), plain.c_str(), 0) == 0;
    };
    for (const auto& rule : rules) {
      const auto& dtypes = rule.dtypes;
      if (!dtypes.empty() && std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end())
        continue;
      if (std::any_of(rule.names.begin(), rule.names.end(), matches)) return &rule;
    }
    return nullptr;
  }
};
Table& table() { return process.part<Table>(); }

void take_longer(Modelled& longest, double seconds, const std::string& name) {
  if (seconds > longest.seconds || longest.law.empty()) longest = {seconds, name};
}

Modelled of_operator(const Work& w, const char* instead) {
  if (!w.rule) return {law("elementwise").seconds(w.bytes, 0, w.rows), ""};
  const auto& rule = *w.rule;
  // Operations on float32 take four times as long as in 16 bits.
  const double flops = w.flops * (w.item >= 4 ? 4 : w.item ? 1 : 0);
  const double bytes = rule.logits ? w.first * 4 : w.bytes;
  Modelled longest;
  if (instead) return {law(instead).seconds(bytes, flops, w.rows), instead};
  if (rule.int8 && w.item == 1) {
    take_longer(longest, rule.int8->seconds(bytes, flops, w.rows), rule.int8->name);
  } else {
    for (const auto* each : rule.laws)
      take_longer(longest, each->seconds(bytes, flops, w.rows), each->name);
  }
  for (const auto* each : rule.collectives)
    take_longer(longest, each->seconds(w.link, w.ranks), each->name);
  return longest;
}

}  // namespace

double Law::seconds(double bytes, double flops, double rows) const {
  const auto& c = chip();
  return (start_us + rows_us * std::min(rows / kFullRows, 1.0)) / 1e6 +
         std::max(bytes / (bandwidth * c.bandwidth), flops / (rate * c.cube_flops));
}

double CollectiveLaw::seconds(double sent, int ranks) const {
  if (ranks < 2) return 0;
  const auto& c = chip();
  const double links = ranks > c.node              ? c.network_bandwidth
                       : c.injection_bandwidth > 0 ? c.injection_bandwidth
                                                   : c.link_bandwidth * (ranks - 1);
  return std::max({start_us / 1e6, rank_us * (ranks - 1) / 1e6, c.collective}) +
         (sent > step_bytes ? step_us / 1e6 : 0) + sent / (bandwidth * links);
}

bool Rule::ai_cpu() const { return !laws.empty() && laws[0]->name == "AI CPU"; }

const Rule* rule_of(const char* name, const std::string& dtype) {
  auto& t = table();
  std::lock_guard lock(t.mutex);
  const auto [at, added] = t.known.try_emplace({name, dtype}, nullptr);
  if (added) at->second = t.lookup(name, dtype);
  return at->second;
}

const Law& law(const std::string& name) {
  const auto* found = table().find(table().laws, name);
  check_emulated(found != nullptr, kInvalidParam, "ASCEND_EMULATOR_LAWS has no law ", name);
  return *found;
}

Modelled modelled(Kind kind, const Work& w, const char* instead) {
  switch (kind) {
    case Kind::op: return of_operator(w, instead);
    case Kind::copy:
      return {std::max(law("copy").seconds(w.bytes, 0, 1),
                  law("copy").start_us / 1e6 + w.link / chip().host_bandwidth),
          "copy"};
    case Kind::collective: {
      const auto* found = table().find(table().collectives, "collective");
      return {found ? found->seconds(w.link, w.ranks) : 0, "collective"};
    }
    default: return {0, "none"};
  }
}

}  // namespace emu::laws
